// The register tiles: everything else exists to feed them. Included by one file an instruction set, which chooses
// kLanes, kTileRows, kTileVectors and kDepth. No function of the standard library here: the linker might keep the copy
// compiled for the wider instruction set and call it from everywhere.
#pragma once

#include <cstring>
#include <utility>

#include "norm_conv.h"

namespace shoal {
namespace {

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

constexpr int kColumns = kTileVectors * kLanes;
// Off the powers of two, so that pixels do not share cache sets; a constant, so that a tile's rows need one register.
constexpr int kPixelStride = kDepth + 16;

inline Vector load(const float* from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }

inline Vector load_some(const float* from, int count) {
    Vector value = {};
    std::memcpy(&value, from, count * sizeof(float));
    return value;
}

inline void store_some(float* to, Vector value, int count) { std::memcpy(to, &value, count * sizeof(float)); }

// A product that is rounded before it is added to, as it is where it goes to memory in between.
inline Vector rounded(Vector product) {
#if SHOAL_FUZZ_NARROW
    // Vectors of 64 bytes on a processor without registers of that size.
    asm("" : "+m"(product));
#elif defined(__x86_64__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#endif
    return product;
}

// How whole vectors and the last channels that fill no vector are read and written.
struct Whole {
    Vector get(const float* from) const { return load(from); }
    void put(float* to, Vector value) const { store(to, value); }
};

struct Some {
    int lanes;
    Vector get(const float* from) const { return load_some(from, lanes); }
    void put(float* to, Vector value) const { store_some(to, value, lanes); }
};

inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// Sums of a column tile over a strip around its first pixel.
struct TileSums {
    float *pivot, *sum, *square;
    bool first;
};

// out[R][kColumns] = start + sum over taps and depth of panel[tap][row][depth] * weight[tap][depth][column]
template <int R, int PixelStride>
void rows_tile(const float* panel, const std::ptrdiff_t* taps, int tap_count, int depth, const float* weight, float* out,
               std::ptrdiff_t ld_out, const float* start, std::ptrdiff_t ld_start, const TileSums* sums) {
    Vector tile[R][kTileVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < kTileVectors; ++c) tile[r][c] = start ? load(start + r * ld_start + c * kLanes) : Vector{};
    for (int t = 0; t < tap_count; ++t) {
        const float* row = panel + taps[t];
        for (int k = 0; k < depth; ++k, ++row, weight += kColumns) {
            Vector columns[kTileVectors];
#pragma GCC unroll 16
            for (int c = 0; c < kTileVectors; ++c) columns[c] = load(weight + c * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
                for (int c = 0; c < kTileVectors; ++c) tile[r][c] += row[r * PixelStride] * columns[c];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < kTileVectors; ++c) store(out + r * ld_out + c * kLanes, tile[r][c]);
    if (!sums) return;
#pragma GCC unroll 16
    for (int c = 0; c < kTileVectors; ++c) {
        const Vector pivot = sums->first ? tile[0][c] : load(sums->pivot + c * kLanes);
        Vector sum = sums->first ? Vector{} : load(sums->sum + c * kLanes);
        Vector square = sums->first ? Vector{} : load(sums->square + c * kLanes);
        if (sums->first) store(sums->pivot + c * kLanes, pivot);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vector off = tile[r][c] - pivot;
            sum += off;
            square += off * off;
        }
        store(sums->sum + c * kLanes, sum);
        store(sums->square + c * kLanes, square);
    }
}

// out[R][kColumns] += sum over pixels of grad[pixel][row] * input[pixel][column]
template <int R, int PixelStride>
void pixels_tile(const float* grad, const float* input, int segments, int width, std::ptrdiff_t next_segment, float* out) {
    Vector tile[R][kTileVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < kTileVectors; ++c) tile[r][c] = load(out + r * kColumns + c * kLanes);
    for (int s = 0; s < segments; ++s, grad += next_segment, input += next_segment) {
        const float *g = grad, *a = input;
        for (int w = 0; w < width; ++w, g += PixelStride, a += PixelStride) {
            Vector columns[kTileVectors];
#pragma GCC unroll 16
            for (int c = 0; c < kTileVectors; ++c) columns[c] = load(a + c * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
                for (int c = 0; c < kTileVectors; ++c) tile[r][c] += g[r] * columns[c];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < kTileVectors; ++c) store(out + r * kColumns + c * kLanes, tile[r][c]);
}

template <int PixelStride, typename Rows>
struct Tiles;

template <int PixelStride, int... Less>
struct Tiles<PixelStride, std::integer_sequence<int, Less...>> {
    static constexpr decltype(&rows_tile<1, PixelStride>) rows[] = {&rows_tile<Less + 1, PixelStride>...};
    static constexpr decltype(&pixels_tile<1, PixelStride>) pixels[] = {&pixels_tile<Less + 1, PixelStride>...};
};

template <int PixelStride>
using TilesOf = Tiles<PixelStride, std::make_integer_sequence<int, kTileRows>>;
using AllTiles = TilesOf<kPixelStride>;

// `count` rows in as few tiles as there can be, of nearly equal size: no tile has too few accumulators to be fast.
template <typename Function>
inline void each_tile(int count, Function function) {
    const int tiles = (count + kTileRows - 1) / kTileRows, size = count / tiles, larger = count % tiles;
    for (int tile = 0, first = 0; tile < tiles; ++tile) {
        const int rows = size + (tile < larger);
        function(first, rows);
        first += rows;
    }
}

}  // namespace
}  // namespace shoal
