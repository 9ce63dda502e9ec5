// Views: `Rows`, a matrix whose rows stand `stride` numbers apart; and `AlignedArray`, the one kind of memory that the engine owns.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <span>

namespace looped::block {

using std::size_t;

template <class T>
struct Rows {
    T* first = nullptr;
    size_t n_rows = 0;
    size_t width = 0;
    size_t stride = 0;

    T* row(size_t i) const noexcept { return first + i * stride; }
    std::span<T> row_span(size_t i) const noexcept { return {row(i), width}; }
    Rows from_row(size_t i) const noexcept { return {row(i), n_rows - i, width, stride}; }
    Rows between(size_t begin, size_t end) const noexcept { return {row(begin), end - begin, width, stride}; }
    Rows from_column(size_t j) const noexcept { return {first + j, n_rows, width - j, stride}; }
    operator Rows<const T>() const noexcept { return {first, n_rows, width, stride}; }
};

// a b, and std::bad_array_new_length instead of a product that wraps.
inline size_t checked_product(size_t a, size_t b) {
    if (b != 0 && a > size_t(std::numeric_limits<std::ptrdiff_t>::max()) / b) throw std::bad_array_new_length();
    return a * b;
}

// `n` numbers on a cache line's border, zero at first.
template <class T>
class AlignedArray {
public:
    AlignedArray() = default;
    explicit AlignedArray(size_t n) : size_(n) {
        if (n > 0) {
            data_.reset(static_cast<T*>(::operator new(checked_product(n, sizeof(T)), std::align_val_t{line})));
            std::uninitialized_value_construct_n(data_.get(), n);
        }
    }

    T* data() const noexcept { return data_.get(); }
    size_t size() const noexcept { return size_; }
    std::span<T> span() const noexcept { return {data_.get(), size_}; }

private:
    static constexpr size_t line = 64;
    struct Free {
        void operator()(T* p) const noexcept { ::operator delete(p, std::align_val_t{line}); }
    };
    std::unique_ptr<T, Free> data_;
    size_t size_ = 0;
};

}  // namespace looped::block
