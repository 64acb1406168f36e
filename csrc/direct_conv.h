// What the driver of the direct convolutions shares with the code of each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

constexpr int kMostDirectChannels = 8, kMostDirectVectors = 8, kMostDirectReads = 6;

// out[channels][vectors * lanes] = start + sum over reads of panel[reads[r] + place] * weight[r][channel]. `start` is one
// number a channel, or null for what `out` holds.
using DirectTile = void (*)(const float* panel, const std::ptrdiff_t* reads, std::int64_t count, const float* weight,
                            const float* start, float* out, std::ptrdiff_t ld_out);

// sums[channel][read][lane] += grad[channel][place] * panel[reads[read] + place] over so many vectors of places.
using DirectGradTile = void (*)(const float* grad, std::ptrdiff_t ld_grad, const float* panel, const std::ptrdiff_t* reads,
                                std::int64_t vectors, float* sums, std::ptrdiff_t ld_sums);

struct DirectLevel {
    int lanes, channels;                 // channels: most of a tile
    int vectors[kMostDirectChannels];    // most of a tile of so many channels plus one
    int grad_channels, reads;            // most of a tile of a gradient
    DirectTile tile[kMostDirectChannels][kMostDirectVectors];
    DirectGradTile grad_tile[kMostDirectChannels][kMostDirectReads];
};

const DirectLevel& portable_direct();
#if defined(__x86_64__)
const DirectLevel& avx2_direct();
const DirectLevel& avx512_direct();
#endif

}  // namespace shoal
