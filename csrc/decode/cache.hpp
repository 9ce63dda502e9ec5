// Keys and values of rows of tokens, in pages of a few tokens each that rows may share.
#pragma once

#include <memory>
#include <vector>

#include "block/weights.hpp"

namespace looped::decode {

using block::Rows;
using std::size_t;

// Which loops of a token have keys and values of their own.
struct Policy {
    enum class Kind : std::uint8_t { per_loop, last_only, modulo, first_then_shared };
    Kind kind = Kind::per_loop;
    size_t period = 1;  // of modulo

    size_t slot(size_t t) const;  // that loop t = 1, 2, ... writes and reads
    size_t n_slots(size_t n_loops) const;
};

// The layers that keep keys and values: the prelude's and the coda's once, the core's in every slot. Where an exit rule runs the coda
// at its checks, the keys and values of these are kept in every slot too.
enum class Part : std::uint8_t { prelude, core, coda, check };

// A page holds `panel` tokens with all their layers: for each, keys [H head_dim, panel] and then values [H, panel, head_dim], so that
// a head's keys are a panel of weights to its queries, and its values rows. Tokens stand in their row's pages one after another. A page
// that rows share is copied when one of them writes to it.
template <class T>
class Cache {
public:
    Cache(const block::Shape& shape, size_t panel);

    size_t n_rows() const { return rows_.size(); }
    size_t n_tokens(size_t row) const { return rows_[row].n_tokens; }
    size_t n_slots() const { return n_slots_; }
    bool has_checks() const { return n_check_ > 0; }

    void start(size_t n_rows, bool has_checks);  // rows without tokens
    // A token has in a new slot what it has in the last one.
    void deepen(size_t n_slots);
    // Room, that nobody shares, for n_new tokens behind a row's own.
    void make_room(size_t row, size_t n_new);
    // The tokens in that room count from now on.
    void append(size_t row, size_t n_new) { rows_[row].n_tokens += n_new; }
    void crop(size_t row, size_t n_kept);
    void select(const std::vector<size_t>& rows);

    // Where in a page a layer's keys or values begin.
    size_t keys(Part part, size_t slot, size_t layer) const { return 2 * half_ * index(part, slot, layer); }
    size_t values(Part part, size_t slot, size_t layer) const { return keys(part, slot, layer) + half_; }
    T* const* pages(size_t row) const { return rows_[row].addresses.data(); }
    // A token keeps in slot `to` what all layers of the part hold of it in slot `from`.
    void carry(Part part, size_t row, size_t place, size_t from, size_t to) const;

private:
    using Page = block::AlignedArray<T>;
    struct Row {
        std::vector<std::shared_ptr<Page>> pages;
        std::vector<T*> addresses;
        size_t n_tokens = 0;

        void push(std::shared_ptr<Page> page);
    };

    size_t index(Part part, size_t slot, size_t layer) const;
    size_t n_layers(size_t n_slots) const { return n_prelude_ + n_coda_ + n_slots * (n_core_ + n_check_); }
    std::shared_ptr<Page> new_page(size_t n_slots) const;

    size_t n_prelude_, n_core_, n_coda_, n_check_ = 0;
    size_t n_heads_, head_dim_, panel_;
    size_t half_;  // numbers of one layer's keys in a page
    size_t n_slots_ = 0;
    std::vector<Row> rows_;
};

extern template class Cache<float>;
extern template class Cache<double>;

}  // namespace looped::decode
