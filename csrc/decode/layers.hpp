// Layers on tokens that move, with the keys and values of all before them in a cache.
//
// Few rows are as fast as the weights are read: a product is then split over the threads by columns, each weight read once. Many rows
// are split by rows. Either way an element's sum runs in one order on one thread: the same bits.
#pragma once

#include "block/forward.hpp"
#include "decode/cache.hpp"

namespace looped::decode {

using block::Matrix, block::PackedMatrix, block::Share;

struct Token {
    size_t row, place;  // in the cache
    size_t position;    // in the table of positions
};

template <class T>
class Layers {
public:
    explicit Layers(const block::Model<T>& model) : model_(model) {}

    // Whom the next calls work with, on at most n_tokens tokens whose rows have at most n_keys.
    void prepare(block::Team& team, block::StopRequest& stop, size_t n_tokens, size_t n_keys);

    // x through one layer. Rows are in the order of the tokens: row after row of the cache, and within it by place. False where a
    // stop was asked for: x is to be thrown away.
    bool run(const block::Layer<T>& layer, Rows<T> x, std::span<const Token> tokens, const Cache<T>& cache, Part part, size_t slot,
             size_t index);

    // out = a W' + bias; of out, nothing beyond the last column is written.
    void multiply_exactly(Rows<const T> a, const PackedMatrix<T>& w, Rows<T> out);

    // job(share, member) on n rows in as many shares as there are members, where the work is worth waking them.
    template <class Job>
    void split(size_t n, double operations, const Job& job) {
        if (operations < fewest_operations) return job(Share{0, n}, size_t(0));
        team_->split(0, n, job);
    }

private:
    static constexpr double fewest_operations = 1e5;  // multiply-adds
    static constexpr size_t most_by_columns = 48;     // rows

    template <class Input>
    void multiply(size_t n, const PackedMatrix<T>& w, Rows<T> out, bool adds_to_out, block::Activation activation, const Input& input);
    // A layer's attention: tokens with their queries, keys and values, and where in the cache the latter belong.
    struct Attending {
        Rows<T> qkv, out;
        std::span<const Token> tokens;
        const Cache<T>& cache;
        size_t keys, values;
    };
    template <class Input>
    void mix(const PackedMatrix<T>& w, const Attending& job, const Input& input);
    double take_segments(std::span<const Token> tokens);
    struct HeadOfRow {
        size_t segment, head;
    };
    template <class Order>
    void attend_all(const Attending& job, size_t n, const Order& order, size_t member) const noexcept;
    void attend(const Attending& job, HeadOfRow own, HeadOfRow next, size_t member) const noexcept;
    void write(Rows<const T> qkv, std::span<const Token> tokens, T* const* pages, size_t head, size_t keys,
               size_t values) const noexcept;

    const block::Model<T>& model_;
    block::Team* team_ = nullptr;
    block::StopRequest* stop_ = nullptr;
    size_t n_tokens_ = 0, n_keys_ = 0, n_members_ = 0;
    Matrix<T> qkv_, attended_, hidden_, normed_;
    std::vector<Matrix<T>> normed_by_, scores_, tails_;  // one a member
    std::vector<size_t> n_seen_;
    std::vector<std::pair<size_t, size_t>> segments_;  // of tokens, one a row
};

extern template class Layers<float>;
extern template class Layers<double>;

}  // namespace looped::decode
