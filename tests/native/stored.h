// What a kernel stores, float32 or bfloat16 as its bits, as a float and back.
#pragma once

#include <cstdint>
#include <cstring>

namespace fuzz {

inline void put(float& to, float value) { to = value; }

// To the nearest, ties to even; of no NaN.
inline void put(std::uint16_t& to, float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to = static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float value_of(float stored) { return stored; }

inline float value_of(std::uint16_t stored) {
    const std::uint32_t bits = static_cast<std::uint32_t>(stored) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace fuzz
