// Which shape a table has, found from its thresholds alone: any table whose pieces are evenly spaced is computed, all
// others are looked up.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "codec_table.h"

namespace shoal {
namespace {

constexpr float kInfinite = std::numeric_limits<float>::infinity();
// How far from a line its thresholds may lie: in codes, and in places of a piece.
constexpr double kLineTolerance = 1.0 / (1 << 17), kHalvesTolerance = 1.5 / 65536, kTreeTolerance = 4.0 / (1 << 24);
// The upper half of a share's bits grows with its logarithm, 128 to a power of two, up to a quarter of one too much or
// an eighth too little, whatever the scale.
constexpr int kKeyRoom = 32;
constexpr double kMaxSlope = 1e12;  // over the least scale it is a float yet

std::int32_t key_of(float share) {
    std::uint32_t bits;
    std::memcpy(&bits, &share, sizeof bits);
    return static_cast<std::int32_t>(bits >> 16);
}

void bound(const float* bounds, Bounds& to) {
    to.at[0] = 0;
    std::copy(bounds, bounds + kMagnitudes - 1, to.at + 1);
    to.at[kMagnitudes] = std::numeric_limits<float>::quiet_NaN();
    to.steps = 0;
    int before = 0;
    for (int cell = 0; cell < kCells; ++cell) {
        const std::int32_t bits = cell ? (kFirstCell + cell) << kCellShift : 0;
        float least;
        std::memcpy(&least, &bits, sizeof least);
        int count = before;
        while (count < kMagnitudes - 1 && to.at[count + 1] <= least) ++count;
        to.start[cell] = count;
        to.steps = std::max(to.steps, count - before);
        before = count;
    }
    to.steps = std::max(to.steps, kMagnitudes - 1 - before);
}

// Cells of the keys such that each holds one of the joins, far from its ends. False where there are none.
bool find_keys(const float* joins, int count, Table& table) {
    const std::int32_t of_one = key_of(1.0f);
    double best = kKeyRoom;
    for (int factor = 120; factor < 400; factor += 2)
        for (int span = 256; (span + kKeyRoom) * factor < 8 << 16; span += 16) {
            const double width = 65536.0 / factor;
            double room = 1e9;
            for (int join = 0; join < count; ++join) {
                const double key = key_of(joins[join]) - of_one + span;
                room = std::min(room, (join + 1) * width - key);
                if (join) room = std::min(room, key - join * width);
            }
            if (room <= best) continue;
            best = room;
            table.key_factor = factor;
            table.key_span = span;
        }
    return best > kKeyRoom;
}

struct Line {
    double slope, offset;
    double operator()(double share) const { return slope * share + offset; }
};

// Through thresholds `first` and `last`, where threshold i is at height i / unit.
Line line_through(const float* at, int first, int last, double unit) {
    const double slope = (last - first) / unit / (double(at[last]) - double(at[first]));
    return {slope, first / unit - slope * double(at[first])};
}

bool is_line(const float* at, const Line& line, int first, int last) {
    for (int i = first; i <= last; ++i)
        if (std::fabs(line(double(at[i])) - i) > kLineTolerance) return false;
    return true;
}

// Codes are dealt to pieces from 0 on, as many to each as lie on one line.
bool derive_lines(Table& table) {
    const float* at = table.middle.at;
    float joins[kPieces + 1];
    int pieces = 0;
    for (int first = 0; first < kMagnitudes;) {
        if (pieces > kPieces) return false;
        int end = std::min(first + 3, kMagnitudes);
        if (end - first < 3) return false;  // one threshold makes no line
        Line line = line_through(at, first + 1, end - 1, 1);
        while (end < kMagnitudes) {
            const Line longer = line_through(at, first + 1, end, 1);
            if (!is_line(at, longer, first + 1, end)) break;
            line = longer;
            ++end;
        }
        const double least = line(first ? double(at[first]) : 0.0);
        if (!(line.slope < kMaxSlope && least > first + 1.0 / 256 && least < first + 1)) return false;
        table.slope[pieces] = line.slope;
        table.offset[pieces] = 128 + line.offset + kLineBias;
        const bool ends = end == kMagnitudes && (pieces == 0 || pieces == kPieces);  // and has no limit
        if (ends && !(line(1) < end - 1.0 / 256)) return false;
        if (pieces < kPieces) table.limit[pieces] = float(128 + end - 1.0 / 256);
        joins[pieces++] = end < kMagnitudes ? at[end] : kInfinite;
        first = end;
    }
    const bool has_top = pieces == kPieces + 1;
    table.top_join = has_top ? joins[kPieces - 1] : kInfinite;
    std::fill_n(table.joins, kPieces, kInfinite);
    std::copy_n(joins, std::min(pieces, kPieces) - 1, table.joins);
    for (int piece = pieces; piece < kPieces; ++piece) {
        table.slope[piece] = table.slope[pieces - 1];
        table.offset[piece] = table.offset[pieces - 1];
        table.limit[piece] = table.limit[pieces - 1];
    }
    if (!has_top) {
        table.slope[kPieces] = table.slope[pieces - 1];
        table.offset[kPieces] = table.offset[pieces - 1];
    }
    table.shape = pieces == 1 ? Shape::kLine : Shape::kLines;
    return pieces == 1 || find_keys(table.joins, std::min(pieces, kPieces) - 1, table);
}

// Of the codes below 16 only 0 is computed: shares of that few are left to be seen exactly.
bool derive_halves(Table& table) {
    constexpr int kCodes = 16;
    const float* at = table.middle.at;
    const Line last_low = line_through(at, 113, 120, 1), last_high = line_through(at, 121, 127, 1);
    if (!(last_high.slope > 0 && last_high.slope < last_low.slope)) return false;
    table.high_slope = float(last_high.slope / last_low.slope);
    table.slope[0] = 0.5 / double(at[1]);
    table.offset[0] = 128.5 + kHalvesBias;
    table.limit[0] = float(129 + 1.0 / 65536);
    table.high_of[0] = 512;
    if (!(table.slope[0] < kMaxSlope)) return false;
    for (int piece = 1; piece < kPieces; ++piece) {
        const int first = kCodes * piece;
        const Line low = line_through(at, first + 1, first + 8, 1), high = line_through(at, first + 9, first + 15, 1);
        const double ratio = double(table.high_slope);
        table.slope[piece] = low.slope;
        table.offset[piece] = 128 + low.offset + kHalvesBias;
        table.high_of[piece] = float((1 - ratio) * (128 + kHalvesBias) + high.offset - ratio * low.offset);
        table.limit[piece] = float(128 + first + kCodes - 1.0 / 256);
        const auto place = [&](double share) {
            const double lower = low.slope * share + double(float(table.offset[piece]));
            return std::min(lower, ratio * lower + double(table.high_of[piece])) - 128 - kHalvesBias;
        };
        for (int i = first + 1; i < first + kCodes; ++i)
            if (!(std::fabs(place(double(at[i])) - i) <= kHalvesTolerance)) return false;
        const double least = place(double(at[first]));
        if (!(low.slope < kMaxSlope && least > first + 1.0 / 256 && least < first + 1)) return false;
    }
    std::fill_n(table.joins, kPieces, kInfinite);
    for (int piece = 1; piece < kPieces; ++piece) table.joins[piece - 1] = at[kCodes * piece];
    table.shape = Shape::kHalves;
    return find_keys(table.joins, kPieces - 1, table);
}

double tree_place(const Table& table, int piece, double share) {
    const double low = table.slope[piece] * share + double(table.low_offset);
    const double high = double(table.high_slope) * low + double(table.high_offset);
    const double across = double(table.across_slope) * low + double(table.across_offset[piece]);
    return std::min({low, high, across, 2 - kTreeRoom});
}

// Piece n has the codes from 2^(n - 1) on: as many places as codes, counted from 1 to 2. Both halves of all pieces are
// the same two lines of the share times a power of the piece. Between the halves' lines a third passes through the
// threshold where one half gives way to the other: it is the least of the three only there.
bool derive_tree(Table& table) {
    const float* at = table.middle.at;
    const Line low = line_through(at, 65, 95, 64), high = line_through(at, 97, 127, 64);
    if (!(low.slope > 0 && high.slope > 0 && high.slope <= low.slope * 1.001)) return false;
    const double ratio = high.slope / low.slope, across = 2 * ratio / (1 + ratio);
    table.low_offset = float(low.offset + kTreeBias);
    table.high_slope = float(ratio);
    table.high_offset = float(high.offset - ratio * low.offset + kTreeBias * (1 - ratio));
    table.across_slope = float(across);
    table.slope[0] = 0;
    table.across_offset[0] = 4;
    for (int piece = 7; piece; --piece) {
        const int codes = 1 << (piece - 1);
        double& slope = table.slope[piece];
        if (codes >= 4) {
            const int last = codes + codes / 2 - 1;  // of the first half
            slope = (double(last) / codes - low.offset) / double(at[last]);
        } else {
            slope = table.slope[piece + 1] * table.slope[piece + 1] / table.slope[piece + 2];
        }
        const double middle = codes > 1 ? slope * double(at[codes + codes / 2]) + low.offset : 0;
        table.across_offset[piece] =
            codes > 1 ? float(1.5 - across * middle + kTreeBias * (1 - across)) : 4.0f;
        for (int i = codes + 1; i < 2 * codes; ++i)
            if (std::fabs(tree_place(table, piece, double(at[i])) - kTreeBias - double(i) / codes) > kTreeTolerance)
                return false;
        if (tree_place(table, piece, double(at[codes])) < 1 + kTreeRoom) return false;
    }
    std::fill_n(table.joins, kPieces, kInfinite);
    for (int piece = 1; piece < kPieces; ++piece) table.joins[piece - 1] = at[1 << (piece - 1)];
    table.shape = Shape::kTree;
    return find_keys(table.joins, kPieces - 1, table);
}

}  // namespace

void derive(const float* magnitudes, const float* thresholds, Table& table) {
    std::copy(magnitudes, magnitudes + kMagnitudes, table.magnitude);
    bound(thresholds, table.middle);
    bound(magnitudes + 1, table.value);
    if (!derive_tree(table) && !derive_halves(table) && !derive_lines(table)) table.shape = Shape::kAny;
}

}  // namespace shoal
