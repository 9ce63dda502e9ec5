#include "loop/anderson.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

namespace looped::loop {
namespace {

constexpr double ridge_share = 1e-8;  // of the trace of the normal equations
constexpr size_t most_columns = 3;

// Of both, scaled; in double, in four sums that are joined in one order.
template <class T>
double dot(std::span<const T> a, std::span<const T> b, double scale) {
    std::array<double, 4> sum{};
    for (size_t i = 0; i < a.size(); ++i) sum[i % 4] += (double(a[i]) * scale) * (double(b[i]) * scale);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

using System = std::array<std::array<double, most_columns + 1>, most_columns>;  // [m, m + 1], the right side last

// Gaussian elimination with partial pivoting.
std::array<double, most_columns> solve(System a, size_t m) {
    for (size_t i = 0; i < m; ++i) {
        size_t pivot = i;
        for (size_t r = i + 1; r < m; ++r) {
            if (std::abs(a[r][i]) > std::abs(a[pivot][i])) pivot = r;
        }
        std::swap(a[i], a[pivot]);
        for (size_t r = i + 1; r < m; ++r) {
            const double factor = a[r][i] / a[i][i];
            for (size_t c = i; c <= m; ++c) a[r][c] -= factor * a[i][c];
        }
    }
    std::array<double, most_columns> x{};
    for (size_t i = m; i-- > 0;) {
        double rest = a[i][m];
        for (size_t c = i + 1; c < m; ++c) rest -= a[i][c] * x[c];
        x[i] = rest / a[i][i];
    }
    return x;
}

// The newest column comes first; without a history all are zero, and get no weight.
template <class T>
void push_column(Rows<T> columns, std::span<const T> now, std::span<const T> before, bool has_history) {
    if (!has_history) {
        for (size_t k = 0; k < columns.n_rows; ++k) std::ranges::fill(columns.row_span(k), T(0));
        return;
    }
    for (size_t k = columns.n_rows; k-- > 1;) std::ranges::copy(columns.row_span(k - 1), columns.row(k));
    for (size_t i = 0; i < now.size(); ++i) columns.row(0)[i] = now[i] - before[i];
}

}  // namespace

template <class T>
bool anderson_step(AndersonMemory<T> memory, Rows<const T> state, Rows<const T> image, double g, Rows<T> mixed) {
    const size_t m = memory.d_residual.n_rows, width = image.width;
    const bool rose = memory.n_seen > 0 && g > memory.g;
    const bool has_history = memory.n_seen > 0 && !rose && std::isfinite(g);

    std::vector<T> residual(memory.residual.size()), flat_image(memory.image.size());
    for (size_t i = 0; i < image.n_rows; ++i) {
        for (size_t j = 0; j < width; ++j) {
            flat_image[i * width + j] = image.row(i)[j];
            residual[i * width + j] = image.row(i)[j] - state.row(i)[j];
        }
    }
    push_column<T>(memory.d_residual, residual, memory.residual, has_history);
    push_column<T>(memory.d_image, flat_image, memory.image, has_history);
    std::ranges::copy(residual, memory.residual.begin());
    std::ranges::copy(flat_image, memory.image.begin());
    memory.g = g;
    memory.n_seen += 1;

    // The scale of the residual cancels in gamma; without it, squares of small residuals would underflow.
    const double scale = g > 0 && std::isfinite(g) ? 1 / g : 1.0;
    System normal{};
    double trace = 0;
    const auto column = [&](size_t k) -> std::span<const T> { return memory.d_residual.row_span(k); };
    for (size_t a = 0; a < m; ++a) {
        for (size_t b = 0; b <= a; ++b) normal[a][b] = normal[b][a] = dot<T>(column(a), column(b), scale);
        normal[a][m] = dot<T>(column(a), residual, scale);
        trace += normal[a][a];
    }
    for (size_t a = 0; a < m; ++a) normal[a][a] += trace > 0 ? ridge_share * trace : 1.0;
    auto gamma = solve(normal, m);
    if (!std::ranges::all_of(gamma, [](double weight) { return std::isfinite(weight); })) gamma.fill(0.0);  // a plain step

    for (size_t i = 0; i < image.n_rows; ++i) {
        for (size_t j = 0; j < width; ++j) {
            double step = 0;
            for (size_t k = 0; k < m; ++k) step += double(memory.d_image.row(k)[i * width + j]) * gamma[k];
            mixed.row(i)[j] = T(double(image.row(i)[j]) - step);
        }
    }
    return rose;
}

template bool anderson_step<float>(AndersonMemory<float>, Rows<const float>, Rows<const float>, double, Rows<float>);
template bool anderson_step<double>(AndersonMemory<double>, Rows<const double>, Rows<const double>, double, Rows<double>);

}  // namespace looped::loop
