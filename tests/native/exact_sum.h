// Sums as the fuzz checks them: all terms are small whole numbers (or quarters), so that floats add them exactly in any
// order while the sum of what they are in size stays below 2^24, and no difference at all is allowed. Beyond it, what
// n roundings can come to.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "buffer.h"

namespace fuzz {

struct Sum {
    double value = 0, size = 0;
    std::int64_t terms = 0;

    void add(double term) { add(term, std::fabs(term), 1); }

    // A term that stands for so many: it was rounded that often, and nothing in it is larger than `most`.
    void add(double term, double most, std::int64_t times) {
        value += term;
        size += most;
        terms += times;
    }

    // Where every term is a multiple of `unit`; 0 where none is exact.
    double allowed(double unit) const {
        return size < unit * 0x1p24 ? 0.0 : size * 0x1p-24 * static_cast<double>(terms + 1);
    }
};

template <typename T>
void expect(const Buffer<T>& found, const std::vector<Sum>& sums, double unit = 1) {
    for (std::int64_t row = 0; row < found.rows(); ++row)
        for (std::int64_t column = 0; column < found.width(); ++column) {
            const Sum& sum = sums[static_cast<std::size_t>(row * found.width() + column)];
            const double value = static_cast<double>(found.at(row, column));
            if (!(std::fabs(value - sum.value) <= sum.allowed(unit)))
                fail("%s[%lld][%lld] is %.9g, not %.9g (within %.3g)", found.name(), static_cast<long long>(row),
                     static_cast<long long>(column), value, sum.value, sum.allowed(unit));
        }
}

// Mean and biased variance of each column of `values`, (rows, columns). The kernels add up deviations from a value of
// the column in floats, at most 2^24 in sum: exact; beyond it n roundings of squares of at most range^2. Then doubles.
inline void expect_statistics(const Buffer<float>& mean, const Buffer<float>& variance, const std::vector<Sum>& values,
                              std::int64_t rows) {
    const std::int64_t columns = mean.width();
    for (std::int64_t column = 0; column < columns; ++column) {
        const auto at = [&](std::int64_t row) {
            return values[static_cast<std::size_t>(row * columns + column)].value;
        };
        double middle = 0, least = at(0), most = at(0), squares = 0;
        for (std::int64_t row = 0; row < rows; ++row) {
            middle += at(row);
            least = std::fmin(least, at(row));
            most = std::fmax(most, at(row));
        }
        middle /= static_cast<double>(rows);
        for (std::int64_t row = 0; row < rows; ++row) squares += (at(row) - middle) * (at(row) - middle);
        const double range = most - least, n = static_cast<double>(rows),
                     size = std::fmax(std::fabs(least), std::fabs(most));
        const double inexact = range * range * n < 0x1p24 ? 1e-12 * range * range : range * range * (n + 1) * 0x1p-24;
        const double inexact_mean = range * n < 0x1p24 ? 1e-12 * size : range * (n + 1) * 0x1p-24;
        const double off = std::fabs(static_cast<double>(mean.at(0, column)) - middle);
        if (!(off <= std::fabs(middle) * 0x1p-23 + inexact_mean))
            fail("mean of channel %lld is %.9g, not %.9g", static_cast<long long>(column),
                 static_cast<double>(mean.at(0, column)), middle);
        const double off_variance = std::fabs(static_cast<double>(variance.at(0, column)) - squares / n);
        if (!(off_variance <= squares / n * 0x1p-23 + inexact))
            fail("variance of channel %lld is %.9g, not %.9g (within %.3g)", static_cast<long long>(column),
                 static_cast<double>(variance.at(0, column)), squares / n, inexact);
    }
}

}  // namespace fuzz
