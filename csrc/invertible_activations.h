// Activations that can be undone, one float at a time and without a branch, so that loops over them become vectors of
// whatever instruction set their caller is built for: always_inline, and no call of libm.
//
// exp(z) - 1 and log(1 + w) of ELU are exact relative to their result, also near zero, where exp(z) - 1 as written would
// cancel and 1 + w would round. Both split off a power of two in such a way that what is left is exact, and end in a
// minimax polynomial (Lawson's algorithm; coefficients rounded one by one, the rest fitted again). Against doubles, over
// every float from where they flatten out to -2^-40, they are off by at most 0.89 and 0.92 ulp.
#pragma once

#include <cstdint>

#define SHOAL_INLINE inline __attribute__((always_inline))

namespace {

SHOAL_INLINE std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

SHOAL_INLINE float float_of(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

constexpr float kLog2High = 0x1.62e3p-1f, kLog2Low = 0x1.2fefa2p-17f;  // times up to 26 the first is exact

// exp(z) - 1 for z <= 0; of NaN, NaN. With z = n log(2) + r it is 2^n (exp(r) - 1) + (2^n - 1).
SHOAL_INLINE float expm1_below_zero(float z) {
    const float kept = z < -18.0f ? -18.0f : z;  // from -17.33 on it is -1
    // Beside 1.5 * 2^23 a float has no digits behind the point: the sum rounds to n, which stands in its lowest bits.
    const float rounded = kept * 0x1.715476p+0f + 0x1.8p23f;
    const float n = rounded - 0x1.8p23f;
    const float power = float_of((bits_of(rounded) << 23) + 0x3f800000u);
    const float r = (kept - n * kLog2High) - n * kLog2Low;
    float series = 0.000197607849f;
    series = series * r + 0.00139323203f;
    series = series * r + 0.00833354704f;
    series = series * r + 0.0416664928f;
    series = series * r + 0.166666657f;
    series = series * r + 0.5f;
    return (r * r * series + r) * power + (power - 1.0f);
}

// log(1 + w) for -1 < w <= 0, which is k log(2) + log(1 + f) where 1 + w = 2^k (1 + f) and 1 + f lies about 1. 1 + w as it
// is rounded only chooses k: f = 2^-k w + (2^-k - 1) is exact.
SHOAL_INLINE float log1p_below_zero(float w) {
    const std::uint32_t bits = bits_of(1.0f + w) + (0x3f800000u - 0x3f3504f3u);  // k grows at sqrt(1/2)
    const float k = static_cast<float>(static_cast<std::int32_t>(bits >> 23) - 127);
    const float power = float_of(0x7f000000u - (bits & 0x7f800000u));
    const float f = w * power + (power - 1.0f), square = f * f;
    float series = -0.0763639957f;
    series = series * f + 0.127621993f;
    series = series * f - 0.131596133f;
    series = series * f + 0.142015815f;
    series = series * f - 0.166234091f;
    series = series * f + 0.200012416f;
    series = series * f - 0.250008196f;
    series = series * f + 0.333333313f;
    return (f + (square * f * series - 0.5f * square + k * kLog2Low)) + k * kLog2High;
}

struct LeakyRelu {
    float slope, inverse_slope;

    explicit LeakyRelu(float slope) : slope(slope), inverse_slope(1.0f / slope) {}
    SHOAL_INLINE float of(float z) const { return z > 0 ? z : z * slope; }
    SHOAL_INLINE float undone(float y) const { return y > 0 ? y : y * inverse_slope; }
    // Of what was activated, from the gradient of the result y.
    SHOAL_INLINE float gradient(float y, float grad) const { return y > 0 ? grad : grad * slope; }
};

struct Elu {
    float alpha;

    explicit Elu(float alpha) : alpha(alpha) {}
    SHOAL_INLINE float of(float z) const { return z > 0 ? z : expm1_below_zero(z > 0 ? 0.0f : z) * alpha; }
    // Rounded to -alpha, the result has no inverse: the smallest that has one stands for it. A NaN stays one.
    SHOAL_INLINE float undone(float y) const {
        const float w = y > 0 ? 0.0f : y / alpha;
        return y > 0 ? y : log1p_below_zero(w < -0x1.fffffep-1f ? -0x1.fffffep-1f : w);
    }
    SHOAL_INLINE float gradient(float y, float grad) const { return y > 0 ? grad : grad * (y + alpha); }
};

}  // namespace
