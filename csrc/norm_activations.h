// What comes after a norm, on vectors or single floats, without a branch or a call of libm: `of` z, the gradient of z from that of the
// result and z, and for those with an inverse z from the result y, and the gradient of z from that of y and y. Included by
// one file an instruction set, after the vectors.
//
// exp(z) - 1 and log(1 + w) of ELU are exact relative to their result, also near zero, where exp(z) - 1 as written would
// cancel and 1 + w would round. Both split off a power of two in such a way that what is left is exact, and end in a
// minimax polynomial (Lawson's algorithm; coefficients rounded one by one, the rest fitted again). Against doubles, over
// every float from where they flatten out to -2^-40, they are off by at most 0.89 and 0.92 ulp.
#pragma once

#include "norm_strip.h"

namespace shoal {
namespace {

typedef std::uint32_t Bits __attribute__((vector_size(kLanes * sizeof(std::uint32_t))));
typedef std::int32_t Integers __attribute__((vector_size(kLanes * sizeof(std::int32_t))));

inline Bits bits_of(Vector value) { return (Bits)value; }
inline Vector float_of(Bits bits) { return (Vector)bits; }
inline Vector signed_number(Bits value) { return __builtin_convertvector((Integers)value, Vector); }

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float signed_number(std::uint32_t value) { return float(std::int32_t(value)); }

constexpr float kLog2High = 0x1.62e3p-1f, kLog2Low = 0x1.2fefa2p-17f;  // times up to 26 the first is exact

// exp(z) - 1 for z <= 0; of NaN, NaN; anything for others. With z = n log(2) + r it is 2^n (exp(r) - 1) + (2^n - 1).
template <typename V>
inline V expm1_below_zero(V z) {
    // Beside 1.5 * 2^23 a float has no digits behind the point: the sum rounds to n, which stands in its lowest bits.
    const V rounded = z * 0x1.715476p+0f + 0x1.8p23f;
    const V n = rounded - 0x1.8p23f;
    const V power = float_of((bits_of(rounded) << 23) + 0x3f800000u);
    const V r = (z - n * kLog2High) - n * kLog2Low;
    V series = V{} + 0.000197607849f;
    series = series * r + 0.00139323203f;
    series = series * r + 0.00833354704f;
    series = series * r + 0.0416664928f;
    series = series * r + 0.166666657f;
    series = series * r + 0.5f;
    const V found = (r * r * series + r) * power + (power - 1.0f);
    return z < V{} - 18.0f ? V{} - 1.0f : found;  // from -17.33 on it is -1; chosen last, nothing waits for it
}

// log(1 + w) for -1 < w <= 0, anything for others, which is k log(2) + log(1 + f) where 1 + w = 2^k (1 + f) and 1 + f lies about 1. 1 + w as it
// is rounded only chooses k: f = 2^-k w + (2^-k - 1) is exact.
template <typename V>
inline V log1p_below_zero(V w) {
    const auto bits = bits_of(w + 1.0f) + (0x3f800000u - 0x3f3504f3u);  // k grows at sqrt(1/2)
    const V k = signed_number((bits >> 23) - 127u);
    const V power = float_of(0x7f000000u - (bits & 0x7f800000u));
    const V f = w * power + (power - 1.0f), square = f * f;
    V series = V{} - 0.0763639957f;
    series = series * f + 0.127621993f;
    series = series * f - 0.131596133f;
    series = series * f + 0.142015815f;
    series = series * f - 0.166234091f;
    series = series * f + 0.200012416f;
    series = series * f - 0.250008196f;
    series = series * f + 0.333333313f;
    return (f + (square * f * series - 0.5f * square + k * kLog2Low)) + k * kLog2High;
}

struct Identity {
    static constexpr bool kHasInverse = true, kReadsInput = false;

    explicit Identity(float) {}
    template <typename V> V of(V z) const { return z; }
    template <typename V> V gradient(V, V grad) const { return grad; }
    template <typename V> V undone(V y) const { return y; }
    template <typename V> V gradient_of_result(V, V grad) const { return grad; }
};

struct Relu {
    static constexpr bool kHasInverse = false, kReadsInput = true;

    explicit Relu(float) {}
    template <typename V> V of(V z) const { return V{} > z ? V{} : z; }
    template <typename V> V gradient(V z, V grad) const { return z <= V{} ? V{} : grad; }
};

struct LeakyRelu {
    static constexpr bool kHasInverse = true, kReadsInput = true;
    float slope, inverse_slope;

    explicit LeakyRelu(float slope) : slope(slope), inverse_slope(1.0f / slope) {}
    template <typename V> V of(V z) const { return z > V{} ? z : z * slope; }
    template <typename V> V gradient(V z, V grad) const { return z > V{} ? grad : grad * slope; }
    template <typename V> V undone(V y) const { return y > V{} ? y : y * inverse_slope; }
    template <typename V> V gradient_of_result(V y, V grad) const { return gradient(y, grad); }
};

struct Elu {
    static constexpr bool kHasInverse = true, kReadsInput = true;
    float alpha;

    explicit Elu(float alpha) : alpha(alpha) {}
    template <typename V> V of(V z) const { return z > V{} ? z : expm1_below_zero(z) * alpha; }
    template <typename V> V gradient(V z, V grad) const {
        return z > V{} ? grad : grad * (expm1_below_zero(z) * alpha + alpha);
    }
    // Rounded to -alpha, the result has no inverse: the smallest that has one stands for it. A NaN stays one.
    template <typename V> V undone(V y) const {
        const V w = y / alpha, least = V{} - 0x1.fffffep-1f;
        return y > V{} ? y : log1p_below_zero(w < least ? least : w);
    }
    template <typename V> V gradient_of_result(V y, V grad) const { return y > V{} ? grad : grad * (y + alpha); }
};

}  // namespace
}  // namespace shoal
