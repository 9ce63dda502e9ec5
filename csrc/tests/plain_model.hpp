// A small model with random weights, and its maps once more in plain double loops: the oracle of the C++ tests.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "block/weights.hpp"

namespace looped::tests {

using std::size_t;
using Numbers = std::vector<double>;

// Numbers between -1 and 1, each a float, the same on every platform.
class Dice {
public:
    explicit Dice(std::uint64_t seed) : state_(seed * 2654435761u + 88172645463325252u) {}
    double roll();
    Numbers rolls(size_t n);

private:
    std::uint64_t state_;
};

class PlainModel {
public:
    // Weights of up to `size` in every linear map, norms near 1.
    PlainModel(const block::Shape& shape, double size, std::uint64_t seed = 0);

    template <class T>
    block::Model<T> packed() const {
        std::map<std::string, std::vector<T>> typed;
        return block::Model<T>(shape, [&](const std::string& name, size_t rows, size_t columns) -> std::span<const T> {
            const Numbers& own = weight(name, rows * columns);
            return typed[name] = std::vector<T>(own.begin(), own.end());
        });
    }

    Numbers embed(const Numbers& features, const std::vector<std::int64_t>& ids) const;  // [T, C]
    Numbers step(const Numbers& state, const Numbers& signal) const;                     // M(Y) [T, C]
    Numbers read(const Numbers& state) const;                                            // [n_read, read_width]

    block::Shape shape;

    // Drawn when it is first asked for, or as it was set.
    Numbers& weight(const std::string& name, size_t n) const;

private:
    Numbers linear(const std::string& name, const Numbers& x, size_t n_in, size_t n_out, bool has_bias) const;
    Numbers norm(const std::string& name, const Numbers& x) const;
    Numbers attend(const Numbers& qkv) const;
    void run_layer(const std::string& prefix, Numbers& x) const;

    double size_;
    std::uint64_t seed_;
    mutable std::map<std::string, Numbers> weights_;
};

// A shape with everything in it that is not asked away.
block::Shape small_shape();

// One token of width 1 with Y <- a (Y + P): attention over one token is its value.
PlainModel scalar_map(double a);

}  // namespace looped::tests
