// Tensors of float32 or bfloat16, read and written as float. Inlined into every caller, whatever instruction set that is
// built for, and without a branch, so that loops over them become vectors.
#pragma once

#include <cstdint>
#include <cstring>

namespace shoal {

inline __attribute__((always_inline)) float read(const float* from) { return *from; }

inline __attribute__((always_inline)) float read(const std::uint16_t* from) {
    const std::uint32_t bits = std::uint32_t{*from} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline __attribute__((always_inline)) void write(float* to, float value) { *to = value; }

// To the nearest bfloat16, ties to even; a NaN stays one.
inline __attribute__((always_inline)) void write(std::uint16_t* to, float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    *to = static_cast<std::uint16_t>(value == value ? nearest : 0x7fc0u);
}

}  // namespace shoal
