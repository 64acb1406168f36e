// Mean and variance from sums of blocks: doubles, and each block around a pivot of its own, so that a mean a thousand
// times the deviation costs no digits (Chan, Golub and LeVeque 1979).
#include "norm_conv.h"

namespace shoal {

void add_block(Moments& to, std::int64_t channels, std::int64_t rows, const float* pivot, const float* sum,
               const float* square) {
    const double each = 1.0 / double(rows), share = double(rows) / double(to.count + rows);
    const double between = double(to.count) * share;
    for (std::int64_t c = 0; c < channels; ++c) {
        const double total = sum[c], off = double(pivot[c]) + total * each - to.mean[c];
        to.squares[c] += double(square[c]) - total * total * each + off * off * between;
        to.mean[c] += off * share;
    }
    to.count += rows;
}

void finish(const Moments* parts, int count, std::int64_t channels, float* mean, float* variance) {
    for (std::int64_t c = 0; c < channels; ++c) {
        double rows = 0, middle = 0, squares = 0;
        for (int part = 0; part < count; ++part) {
            if (!parts[part].count) continue;
            const double more = double(parts[part].count), off = parts[part].mean[c] - middle;
            squares += parts[part].squares[c] + off * off * rows * more / (rows + more);
            middle += off * more / (rows + more);
            rows += more;
        }
        mean[c] = float(middle);
        variance[c] = squares > 0 || squares != squares ? float(squares / rows) : 0.0f;
    }
}

}  // namespace shoal
