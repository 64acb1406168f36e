// The register tiles of the direct convolutions. Included by one file an instruction set, which chooses kLanes, kChannels,
// kSums, how many vectors of sums fit in registers, and kGradChannels and kReads of a gradient's tile. No function of the standard library here: the linker might keep
// the copy compiled for the wider instruction set and call it from everywhere.
#pragma once

#include <cstring>

#include "direct_conv.h"

namespace shoal {
namespace {

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

constexpr int vectors_of(int channels) {
    const int fit = kSums / channels;
    return fit < kMostVectors ? fit : kMostVectors;
}

inline Vector load(const float* from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }

template <int C, int V>
void tile(const float* panel, const std::ptrdiff_t* reads, std::int64_t count, const float* weight, const float* start,
          float* out, std::ptrdiff_t ld_out) {
    Vector sums[C][V];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sums[c][v] = start ? Vector{} + start[c] : load(out + c * ld_out + v * kLanes);
    for (std::int64_t r = 0; r < count; ++r, weight += C) {
        const float* from = panel + reads[r];
        Vector across[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) across[v] = load(from + v * kLanes);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c)
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) sums[c][v] += weight[c] * across[v];
    }
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) store(out + c * ld_out + v * kLanes, sums[c][v]);
}

template <int C, int R>
void grad_tile(const float* grad, std::ptrdiff_t ld_grad, const float* panel, const std::ptrdiff_t* reads,
               std::int64_t vectors, float* sums, std::ptrdiff_t ld_sums) {
    Vector own[C][R];
    const float* from[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) from[r] = panel + reads[r];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) own[c][r] = Vector{};  // not `sums`: long sums of single floats lose digits
    for (std::int64_t place = 0; place < vectors * kLanes; place += kLanes) {
        Vector read[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) read[r] = load(from[r] + place);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
            const Vector one = load(grad + c * ld_grad + place);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) own[c][r] += one * read[r];
        }
    }
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            float* to = sums + c * ld_sums + r * kLanes;
            store(to, load(to) + own[c][r]);
        }
}

template <int C>
constexpr void tiles_of(DirectLevel& level) {
    level.vectors[C - 1] = vectors_of(C);
    constexpr int most = vectors_of(C);
    level.tile[C - 1][0] = &tile<C, 1>;
    if constexpr (most >= 2) level.tile[C - 1][1] = &tile<C, 2>;
    if constexpr (most >= 3) level.tile[C - 1][2] = &tile<C, 3>;
    if constexpr (most >= 4) level.tile[C - 1][3] = &tile<C, 4>;
    if constexpr (most >= 5) level.tile[C - 1][4] = &tile<C, 5>;
    if constexpr (most >= 6) level.tile[C - 1][5] = &tile<C, 6>;
    if constexpr (most >= 7) level.tile[C - 1][6] = &tile<C, 7>;
    if constexpr (most >= 8) level.tile[C - 1][7] = &tile<C, 8>;
    if constexpr (C > 1) tiles_of<C - 1>(level);
}

template <int C, int R>
constexpr void grad_tiles_of(DirectLevel& level) {
    level.grad_tile[C - 1][R - 1] = &grad_tile<C, R>;
    if constexpr (R > 1) grad_tiles_of<C, R - 1>(level);
    else if constexpr (C > 1) grad_tiles_of<C - 1, kReads>(level);
}

constexpr DirectLevel all_tiles() {
    DirectLevel level{};
    level.lanes = kLanes;
    level.channels = kChannels;
    level.grad_channels = kGradChannels;
    level.reads = kReads;
    tiles_of<kChannels>(level);
    grad_tiles_of<kGradChannels, kReads>(level);
    return level;
}

constexpr DirectLevel kDirect = all_tiles();

}  // namespace
}  // namespace shoal
