// The table codecs in vectors. Included by one file an instruction set, which defines the vectors `Floats` and `Ints` of
// kLanes elements and what they can do. No function of the standard library here: the linker might keep the copy
// compiled for the wider instruction set and call it from everywhere.
//
// Indices are computed and not looked up: a lookup a value costs more than all of this. What is computed is a little
// more than the true place of a share among the thresholds, so that its whole part is the index unless the fraction is
// less than twice the error; such groups are done again exactly. Joins of pieces are compared exactly, so that the
// piece is always right. Everything is in units of the values, not of their scale: no division.
#pragma once

#include "codec_table.h"

namespace shoal {
namespace {

constexpr int kVectors = 4, kGroup = kVectors * kLanes;
#define SHOAL_EACH_VECTOR _Pragma("GCC unroll 4") for (int v = 0; v < kVectors; ++v)

std::uint32_t largest(const float* x, std::int64_t count) {
    const Ints magnitude = all(0x7fffffff);
    Ints most[kVectors];
    SHOAL_EACH_VECTOR most[v] = all(0);
    std::int64_t i = 0;
    for (; i + kGroup <= count; i += kGroup)
        SHOAL_EACH_VECTOR most[v] = greatest(most[v], both(load(x + i + v * kLanes), magnitude));
    std::uint32_t found = 0;
    alignas(64) std::uint32_t lanes[kLanes];
    store(lanes, greatest(greatest(most[0], most[1]), greatest(most[2], most[3])));
    for (int lane = 0; lane < kLanes; ++lane) found = lanes[lane] > found ? lanes[lane] : found;
    for (; i < count; ++i) {
        const std::uint32_t bits = bits_of(x[i]) & 0x7fffffff;
        found = bits > found ? bits : found;
    }
    return found;
}

// How many bounds are at most y, exactly.
inline Ints count_of(const Bounds& bounds, Floats y) {
    const Ints cell = greatest(minus(shifted_down<kCellShift>(ints(y)), all(kFirstCell)), all(0));
    Ints index = gather(bounds.start, least(cell, all(kCells - 1)));
    for (std::int32_t step = 0; step < bounds.steps; ++step)
        index = next_if_at_most(index, gather(bounds.at + 1, index), y);
    return index;
}

void encode_exactly(const Table& table, const float* x, float scale, std::uint8_t* codes) {
    Ints place[kVectors];
    SHOAL_EACH_VECTOR {
        const Floats y = divided(floats(both(load(x + v * kLanes), all(0x7fffffff))), all(scale));
        place[v] = shifted_up<16>(count_of(table.middle, y));
    }
    put_codes(place, x, codes);
}

// A table's constants over one scale, in registers.
struct Scaled {
    Ints offset, factor, below_join;
    Floats slope;

    Scaled(const Table& table, float scale)
        : offset(all((static_cast<std::int32_t>(bits_of(scale) >> 16) - table.key_span) << 16 | 0xffff)),
          factor(all(table.key_factor << 16)) {
        std::int32_t below[kPieces];
        float slopes[kPieces];
        for (int piece = 0; piece < kPieces; ++piece) {
            below[piece] = just_below(table.joins[piece], scale);
            slopes[piece] = float(table.slope[piece] / double(scale));
        }
        below_join = load_pieces(below);
        slope = load_pieces(slopes);
    }

    // The bits of the greatest float whose share is less than `join`: the product is off by three at most.
    static std::int32_t just_below(float join, float scale) {
        if (!(join <= 1)) return 0x7f800000;
        const std::int32_t near = static_cast<std::int32_t>(bits_of(join * scale));
        std::int32_t found = near - 4;
        for (std::int32_t bits = near - 3; bits <= near + 3; ++bits) found += float_of(bits) / scale < join;
        return found;
    }

    Ints piece_of(Ints magnitude) const {
        const Ints cell = upper(high_product16(minus16(magnitude, offset), factor));
        return next_if_greater(cell, magnitude, pick(below_join, cell));
    }
};

// places(magnitudes, place) writes index << 16 | fraction of a group; bits above the index may be set.
template <bool kClips, typename Places>
inline void encode_groups(const Table& table, const float* x, std::int64_t groups, float scale, const float* ahead,
                          std::uint8_t* codes, const Places& places) {
    const Ints magnitude = all(0x7fffffff), most = all(static_cast<std::int32_t>(bits_of(scale)));
    for (; groups; --groups, x += kGroup, codes += kGroup) {
        Ints shares[kVectors], place[kVectors];
        SHOAL_EACH_VECTOR shares[v] = both(load(x + v * kLanes), magnitude);
        if (kClips) SHOAL_EACH_VECTOR shares[v] = least(shares[v], most);
        places(shares, place);
        const Ints nearest = least16(least16(place[0], place[1]), least16(place[2], place[3]));
        put_codes(place, x, codes);
        if (ahead) {
            for (int line = 0; line < kGroup / 16; ++line) __builtin_prefetch(ahead + 16 * line);
            ahead += kGroup;
        }
        if (__builtin_expect(any_lower_less(nearest, Places::kNearest), 0)) encode_exactly(table, x, scale, codes);
    }
}

struct LinePlaces {
    static constexpr int kNearest = kNear;
    Floats slope, offset;
    LinePlaces(const Table& table, float scale)
        : slope(all(float(table.slope[0] / double(scale)))), offset(all(float(table.offset[0]))) {}
    void operator()(const Ints* shares, Ints* place) const {
        SHOAL_EACH_VECTOR place[v] = ints(multiply_add(floats(shares[v]), slope, offset));
    }
};

struct LinesPlaces {
    static constexpr int kNearest = kNear;
    Scaled scaled;
    Floats offset, limit, top_slope, top_offset;
    Ints below_top;
    LinesPlaces(const Table& table, float scale)
        : scaled(table, scale), limit(load_pieces(table.limit)),
          top_slope(all(float(table.slope[kPieces] / double(scale)))), top_offset(all(float(table.offset[kPieces]))),
          below_top(all(Scaled::just_below(table.top_join, scale))) {
        float offsets[kPieces];
        for (int piece = 0; piece < kPieces; ++piece) offsets[piece] = float(table.offset[piece]);
        offset = load_pieces(offsets);
    }
    // One vector after the other, here and below: all four at once want more registers than there are.
    void operator()(const Ints* shares, Ints* place) const {
        SHOAL_EACH_VECTOR {
            const Ints piece = scaled.piece_of(shares[v]);
            const Floats low = multiply_add(floats(shares[v]), pick(scaled.slope, piece), pick(offset, piece));
            const Floats top = multiply_add(floats(shares[v]), top_slope, top_offset);
            place[v] = least(ints(low), ints(pick(limit, piece)));
            place[v] = chosen_if_greater(shares[v], below_top, ints(top), place[v]);
        }
    }
};

struct HalvesPlaces {
    static constexpr int kNearest = kNearHalves;
    Scaled scaled;
    Floats offset, high_slope, high_of, limit;
    HalvesPlaces(const Table& table, float scale)
        : scaled(table, scale), high_slope(all(table.high_slope)), high_of(load_pieces(table.high_of)),
          limit(load_pieces(table.limit)) {
        float offsets[kPieces];
        for (int piece = 0; piece < kPieces; ++piece) offsets[piece] = float(table.offset[piece]);
        offset = load_pieces(offsets);
    }
    void operator()(const Ints* shares, Ints* place) const {
        SHOAL_EACH_VECTOR {
            const Ints piece = scaled.piece_of(shares[v]);
            const Floats low = multiply_add(floats(shares[v]), pick(scaled.slope, piece), pick(offset, piece));
            const Floats high = multiply_add(low, high_slope, pick(high_of, piece));
            place[v] = least(least(ints(low), ints(pick(limit, piece))), ints(high));
        }
    }
};

struct TreePlaces {
    static constexpr int kNearest = kNear;
    Scaled scaled;
    Floats low_offset, high_slope, high_offset, across_slope, across_offset, most;
    TreePlaces(const Table& table, float scale)
        : scaled(table, scale), low_offset(all(table.low_offset)), high_slope(all(table.high_slope)),
          high_offset(all(table.high_offset)), across_slope(all(table.across_slope)),
          across_offset(load_pieces(table.across_offset)), most(all(float(2 - kTreeRoom))) {}
    void operator()(const Ints* shares, Ints* place) const {
        Ints piece[kVectors], first[kVectors], second[kVectors];
        Floats low[kVectors];
        SHOAL_EACH_VECTOR piece[v] = scaled.piece_of(shares[v]);
        SHOAL_EACH_VECTOR low[v] = multiply_add(floats(shares[v]), pick(scaled.slope, piece[v]), low_offset);
        // Places are positive: they compare as whole numbers, which more of the ports can do.
        SHOAL_EACH_VECTOR first[v] = least(ints(multiply_add(low[v], high_slope, high_offset)), ints(most));
        SHOAL_EACH_VECTOR second[v] =
            least(ints(low[v]), ints(multiply_add(low[v], across_slope, pick(across_offset, piece[v]))));
        // Bits of 1 ... 2 less 0x3f000000 are the mantissa with its leading one: 2^23 ... 2^24.
        SHOAL_EACH_VECTOR place[v] = minus(least(first[v], second[v]), all(0x3f000000));
        SHOAL_EACH_VECTOR place[v] = shifted_down(place[v], minus(all(8), piece[v]));
    }
};

template <bool kClips>
inline void encode_whole(const Table& table, const float* x, std::int64_t groups, float scale, const float* ahead,
                         std::uint8_t* codes) {
    switch (table.shape) {
        case Shape::kLine:
            return encode_groups<kClips>(table, x, groups, scale, ahead, codes, LinePlaces(table, scale));
        case Shape::kLines:
            return encode_groups<kClips>(table, x, groups, scale, ahead, codes, LinesPlaces(table, scale));
        case Shape::kHalves:
            return encode_groups<kClips>(table, x, groups, scale, ahead, codes, HalvesPlaces(table, scale));
        case Shape::kTree:
            return encode_groups<kClips>(table, x, groups, scale, ahead, codes, TreePlaces(table, scale));
        case Shape::kAny: break;
    }
}

void encode(const Table& table, const float* x, std::int64_t count, float scale, bool clip, const float* ahead,
            std::uint8_t* codes) {
    const std::int64_t groups = count / kGroup;
    const bool computes = table.shape != Shape::kAny && scale >= kMinScale && scale <= kMaxScale;
    if (computes && clip) encode_whole<true>(table, x, groups, scale, ahead, codes);
    if (computes && !clip) encode_whole<false>(table, x, groups, scale, ahead, codes);
    for (std::int64_t group = computes ? groups : 0; group < groups; ++group)
        encode_exactly(table, x + group * kGroup, scale, codes + group * kGroup);
    const std::int64_t done = groups * kGroup;
    if (done == count) return;
    alignas(64) float last[kGroup] = {};
    alignas(64) std::uint8_t found[kGroup];
    __builtin_memcpy(last, x + done, (count - done) * sizeof(float));
    encode_exactly(table, last, scale, found);
    __builtin_memcpy(codes + done, found, count - done);
}

inline void draw_group(const Table& table, const float* x, float scale, Draws draws, std::uint8_t* codes) {
    Ints place[kVectors];
    SHOAL_EACH_VECTOR {
        const Floats y = divided(floats(both(load(x + v * kLanes), all(0x7fffffff))), all(scale));
        const Ints index = count_of(table.value, y), next = least(plus(index, all(1)), all(kMagnitudes - 1));
        const Floats below = gather(table.magnitude, index), above = gather(table.magnitude, next);
        const Floats share = divided(less(y, below), less(above, below));
        Ints h = exclusive(plus(all(static_cast<std::int32_t>(draws.first + v * kLanes)), lane_numbers()),
                           all(static_cast<std::int32_t>(draws.seed)));
        h = times(exclusive(h, shifted_down<16>(h)), all(0x7feb352d));
        h = times(exclusive(h, shifted_down<15>(h)), all(static_cast<std::int32_t>(0x846ca68b)));
        h = exclusive(h, shifted_down<16>(h));
        const Floats uniform = times(as_floats(shifted_down<8>(h)), all(0x1p-24f));
        place[v] = shifted_up<16>(least(next_if_less(index, uniform, share), all(kMagnitudes - 1)));
    }
    put_codes(place, x, codes);
}

void draw(const Table& table, const float* x, std::int64_t count, float scale, Draws draws, std::uint8_t* codes) {
    std::int64_t i = 0;
    for (; i + kGroup <= count; i += kGroup, draws.first += kGroup)
        draw_group(table, x + i, scale, draws, codes + i);
    if (i == count) return;
    alignas(64) float last[kGroup] = {};
    alignas(64) std::uint8_t found[kGroup];
    __builtin_memcpy(last, x + i, (count - i) * sizeof(float));
    draw_group(table, last, scale, draws, found);
    __builtin_memcpy(codes + i, found, count - i);
}

void signs(const float* x, std::int64_t count, std::uint8_t* codes) {
    for (std::int64_t i = 0; i < count; ++i) codes[i] = static_cast<std::uint8_t>(bits_of(x[i]) >> 24 & 0x80);
}

}  // namespace
}  // namespace shoal
