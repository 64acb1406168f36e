// What the driver of max pooling shares with the code of each instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace shoal {

constexpr int kMostPoolPlaces = 255, kNoPlace = 255;

template <typename To, typename From>
inline To seen_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// A bfloat16 is the upper half of a float. Rounded to the nearest, ties to even; a NaN stays one, as sums of bfloat16 have
// no bits of it in the lower half. Of one or of a vector.
template <typename Bits>
inline Bits rounded_to_half(Bits bits) {
    return (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
}

// What one lane reads: the element there, and the byte of that place of the window.
struct PoolRead {
    std::int64_t at;
    std::int32_t place;
};

// Of each lane the first of the greatest values, or the last NaN, and its byte; kNoPlace of zero after a ReLU. From lane
// to lane x is read `stride` elements further on.
struct PoolWinners {
    const void* x;
    std::int64_t stride, lanes;
    const PoolRead* reads;
    int count;
    bool after_relu;
    void* pooled;
    std::uint8_t* places;
};

// Of each lane the sum of those gradients whose byte is that of the read, rounded after each.
struct PoolGradients {
    const void* grad;
    const std::uint8_t* places;
    std::int64_t lanes;
    const PoolRead* reads;
    int count;
    void* grad_x;
};

struct PoolLevel {
    void (*winners[2])(const PoolWinners&);  // of float32 and of bfloat16
    void (*gradients[2])(const PoolGradients&);
};

const PoolLevel& portable_pool();
#if defined(__x86_64__)
const PoolLevel& avx2_pool();
const PoolLevel& avx512_pool();
#endif

}  // namespace shoal
