#include "decode/cache.hpp"

#include <algorithm>
#include <atomic>
#include <map>

namespace looped::decode {

size_t Policy::slot(size_t t) const {
    switch (kind) {
        case Kind::per_loop: return t - 1;
        case Kind::modulo: return (t - 1) % period;
        case Kind::last_only: return 0;
        case Kind::first_then_shared: return std::min<size_t>(t, 2) - 1;
    }
    return 0;
}

size_t Policy::n_slots(size_t n_loops) const {
    switch (kind) {
        case Kind::per_loop: return n_loops;
        case Kind::modulo: return std::min(period, n_loops);
        case Kind::last_only: return std::min<size_t>(1, n_loops);
        case Kind::first_then_shared: return std::min<size_t>(2, n_loops);
    }
    return 0;
}

template <class T>
Cache<T>::Cache(const block::Shape& shape, size_t panel)
    : n_prelude_(shape.n_prelude),
      n_core_(shape.n_core),
      n_coda_(shape.n_coda),
      n_heads_(shape.n_heads),
      head_dim_(shape.head_dim),
      panel_(panel),
      half_(block::checked_product(shape.attention_width(), panel)) {}

template <class T>
void Cache<T>::Row::push(std::shared_ptr<Page> page) {
    addresses.reserve(pages.size() + 1);
    addresses.push_back(page->data());
    try {
        pages.push_back(std::move(page));
    } catch (...) {
        addresses.pop_back();
        throw;
    }
}

template <class T>
void Cache<T>::start(size_t n_rows, bool has_checks) {
    rows_.assign(n_rows, Row{});
    n_slots_ = 0;
    n_check_ = has_checks ? n_coda_ : 0;
}

template <class T>
size_t Cache<T>::index(Part part, size_t slot, size_t layer) const {
    if (part == Part::prelude) return layer;
    if (part == Part::coda) return n_prelude_ + layer;
    return n_layers(slot) + (part == Part::check ? n_core_ : 0) + layer;
}

template <class T>
std::shared_ptr<block::AlignedArray<T>> Cache<T>::new_page(size_t n_slots) const {
    // Kernels read whole vectors, some beyond the last value.
    return std::make_shared<Page>(block::checked_product(2 * half_, n_layers(n_slots)) + 2 * block::widest_panel);
}

template <class T>
void Cache<T>::deepen(size_t n_slots) {
    if (n_slots <= n_slots_) return;
    std::map<const Page*, std::shared_ptr<Page>> deeper;  // what rows share, they go on sharing
    for (const Row& row : rows_) {
        for (const auto& page : row.pages) deeper.try_emplace(page.get(), nullptr);
    }
    const size_t group = 2 * half_ * (n_core_ + n_check_), own = 2 * half_ * n_layers(n_slots_);
    for (auto& [old, page] : deeper) {
        page = new_page(n_slots);
        std::copy_n(old->data(), own, page->data());
        for (size_t slot = n_slots_; n_slots_ > 0 && slot < n_slots; ++slot) {
            std::copy_n(old->data() + own - group, group, page->data() + own + (slot - n_slots_) * group);
        }
    }
    for (Row& row : rows_) {
        for (size_t i = 0; i < row.pages.size(); ++i) {
            row.pages[i] = deeper[row.pages[i].get()];
            row.addresses[i] = row.pages[i]->data();
        }
    }
    n_slots_ = n_slots;
}

template <class T>
void Cache<T>::make_room(size_t i, size_t n_new) {
    if (n_new == 0) return;
    Row& row = rows_[i];
    const size_t first = row.n_tokens / panel_, end = (row.n_tokens + n_new + panel_ - 1) / panel_;
    for (size_t k = first; k < std::min(end, row.pages.size()); ++k) {
        if (row.pages[k].use_count() == 1) {
            std::atomic_thread_fence(std::memory_order_acquire);  // whoever shared it has read it
            continue;
        }
        auto own = new_page(n_slots_);
        std::ranges::copy(row.pages[k]->span(), own->data());
        row.addresses[k] = own->data();
        row.pages[k] = std::move(own);
    }
    while (row.pages.size() < end) row.push(new_page(n_slots_));
}

template <class T>
void Cache<T>::crop(size_t i, size_t n_kept) {
    Row& row = rows_[i];
    row.n_tokens = std::min(row.n_tokens, n_kept);
    const size_t n_pages = (row.n_tokens + panel_ - 1) / panel_;
    row.pages.resize(std::min(row.pages.size(), n_pages));
    row.addresses.resize(row.pages.size());
}

template <class T>
void Cache<T>::select(const std::vector<size_t>& rows) {
    std::vector<Row> chosen;
    chosen.reserve(rows.size());
    for (size_t row : rows) chosen.push_back(rows_[row]);
    rows_ = std::move(chosen);
}

template <class T>
void Cache<T>::carry(Part part, size_t row, size_t place, size_t from, size_t to) const {
    T* page = rows_[row].addresses[place / panel_];
    const size_t lane = place % panel_, n_own = part == Part::core ? n_core_ : n_check_;
    for (size_t layer = 0; layer < n_own; ++layer) {
        const size_t own = keys(part, from, layer), other = keys(part, to, layer);
        for (size_t c = 0; c < n_heads_ * head_dim_; ++c) page[other + c * panel_ + lane] = page[own + c * panel_ + lane];
        for (size_t head = 0; head < n_heads_; ++head) {
            const size_t at = half_ + (head * panel_ + lane) * head_dim_;
            std::copy_n(page + own + at, head_dim_, page + other + at);
        }
    }
}

template class Cache<float>;
template class Cache<double>;

}  // namespace looped::decode
