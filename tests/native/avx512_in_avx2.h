// The instructions of AVX-512 that csrc/codec_avx512.cpp uses, as loops over lanes: put before it by fuzz.cmake, so that
// no processor is too old to check what it computes, reads and writes.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace narrow {

struct Ints {
    std::uint32_t lane[16];
};
struct Floats {
    float lane[16];
};
using Mask = std::uint16_t;

template <typename To, typename From>
inline To cast(const From& from) {
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <typename Vector, typename Function>
inline Vector lanes(Function of) {
    Vector made;
    for (int i = 0; i < 16; ++i) made.lane[i] = of(i);
    return made;
}

template <typename Function>
inline Mask mask(Function of) {
    Mask made = 0;
    for (int i = 0; i < 16; ++i) made = static_cast<Mask>(made | (of(i) ? 1u << i : 0u));
    return made;
}

template <typename Function>
inline Ints halves(const Ints& a, const Ints& b, Function of) {
    std::uint16_t left[32], right[32], made[32];
    std::memcpy(left, &a, 64);
    std::memcpy(right, &b, 64);
    for (int i = 0; i < 32; ++i) made[i] = static_cast<std::uint16_t>(of(std::uint32_t{left[i]}, std::uint32_t{right[i]}));
    Ints to;
    std::memcpy(&to, made, 64);
    return to;
}

inline std::int32_t number(std::uint32_t bits) { return static_cast<std::int32_t>(bits); }

inline Ints set1(std::int32_t value) {
    return lanes<Ints>([&](int) { return static_cast<std::uint32_t>(value); });
}
inline Floats set1(float value) {
    return lanes<Floats>([&](int) { return value; });
}
inline Ints load(const void* from) {
    Ints to;
    std::memcpy(&to, from, 64);
    return to;
}
inline void store(void* to, const Ints& a) { std::memcpy(to, &a, 64); }
template <typename Vector, typename Number>
inline Vector gathered(const Ints& at, const Number* from) {
    return lanes<Vector>([&](int i) { return static_cast<decltype(Vector{}.lane[0] + 0)>(from[number(at.lane[i])]); });
}

}  // namespace narrow

#define SHOAL_LANES(op) narrow::lanes<narrow::Ints>([&](int i) { return op; })
#define SHOAL_FLOATS(op) narrow::lanes<narrow::Floats>([&](int i) { return op; })
#define SHOAL_MASK(op) narrow::mask([&](int i) { return op; })

namespace narrow {

inline Ints and_(Ints a, Ints b) { return SHOAL_LANES(a.lane[i] & b.lane[i]); }
inline Ints or_(Ints a, Ints b) { return SHOAL_LANES(a.lane[i] | b.lane[i]); }
inline Ints xor_(Ints a, Ints b) { return SHOAL_LANES(a.lane[i] ^ b.lane[i]); }
inline Ints add(Ints a, Ints b) { return SHOAL_LANES(a.lane[i] + b.lane[i]); }
inline Ints sub(Ints a, Ints b) { return SHOAL_LANES(a.lane[i] - b.lane[i]); }
inline Ints mullo(Ints a, Ints b) { return SHOAL_LANES(a.lane[i] * b.lane[i]); }
inline Ints min(Ints a, Ints b) { return SHOAL_LANES(number(a.lane[i]) < number(b.lane[i]) ? a.lane[i] : b.lane[i]); }
inline Ints max(Ints a, Ints b) { return SHOAL_LANES(number(a.lane[i]) > number(b.lane[i]) ? a.lane[i] : b.lane[i]); }
inline Ints srlv(Ints a, Ints b) { return SHOAL_LANES(b.lane[i] < 32 ? a.lane[i] >> b.lane[i] : 0); }
inline Ints srli(Ints a, unsigned bits) { return SHOAL_LANES(a.lane[i] >> bits); }
inline Ints slli(Ints a, unsigned bits) { return SHOAL_LANES(a.lane[i] << bits); }
inline Ints subs16(Ints a, Ints b) {
    return halves(a, b, [](std::uint32_t l, std::uint32_t r) { return l > r ? l - r : 0; });
}
inline Ints min16(Ints a, Ints b) {
    return halves(a, b, [](std::uint32_t l, std::uint32_t r) { return l < r ? l : r; });
}
inline Ints mulhi16(Ints a, Ints b) {
    return halves(a, b, [](std::uint32_t l, std::uint32_t r) { return l * r >> 16; });
}
inline Floats convert(Ints a) { return SHOAL_FLOATS(static_cast<float>(number(a.lane[i]))); }
inline Floats mul(Floats a, Floats b) { return SHOAL_FLOATS(a.lane[i] * b.lane[i]); }
inline Floats sub(Floats a, Floats b) { return SHOAL_FLOATS(a.lane[i] - b.lane[i]); }
inline Floats div(Floats a, Floats b) { return SHOAL_FLOATS(a.lane[i] / b.lane[i]); }
inline Floats fma(Floats a, Floats b, Floats c) { return SHOAL_FLOATS(std::fma(a.lane[i], b.lane[i], c.lane[i])); }
inline Ints permute(Ints at, Ints a) { return SHOAL_LANES(a.lane[at.lane[i] & 15]); }
inline Floats permute(Ints at, Floats a) { return SHOAL_FLOATS(a.lane[at.lane[i] & 15]); }
inline Ints permute(Ints a, Ints at, Ints b) {
    return SHOAL_LANES(at.lane[i] & 16 ? b.lane[at.lane[i] & 15] : a.lane[at.lane[i] & 15]);
}
inline Ints blend(Mask mask, Ints no, Ints yes) { return SHOAL_LANES(mask >> i & 1 ? yes.lane[i] : no.lane[i]); }
inline Ints mask_add(Ints from, Mask mask, Ints a, Ints b) { return blend(mask, from, add(a, b)); }
inline Ints mask_xor(Ints from, Mask mask, Ints a, Ints b) { return blend(mask, from, xor_(a, b)); }
inline Mask greater(Ints a, Ints b) { return SHOAL_MASK(number(a.lane[i]) > number(b.lane[i])); }
inline Mask below(Ints a, Ints b) { return SHOAL_MASK(a.lane[i] < b.lane[i]); }
inline Mask test(Ints a, Ints b) { return SHOAL_MASK(a.lane[i] & b.lane[i]); }
inline Mask compare(Floats a, Floats b, int how) {
    return SHOAL_MASK(how == _CMP_LE_OQ ? a.lane[i] <= b.lane[i] : a.lane[i] < b.lane[i]);
}
inline __m128i bytes(Ints a) {
    alignas(16) std::uint8_t made[16];
    for (int i = 0; i < 16; ++i) made[i] = static_cast<std::uint8_t>(a.lane[i]);
    return _mm_load_si128(reinterpret_cast<const __m128i*>(made));
}
inline Ints from_bytes(__m128i a) {
    alignas(16) std::uint8_t from[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(from), a);
    return SHOAL_LANES(from[i]);
}

}  // namespace narrow

#undef SHOAL_LANES
#undef SHOAL_FLOATS
#undef SHOAL_MASK

#define __m512i narrow::Ints
#define __m512 narrow::Floats
#define _mm512_set1_epi32 narrow::set1
#define _mm512_set1_ps narrow::set1
#define _mm512_castps_si512 narrow::cast<narrow::Ints>
#define _mm512_castsi512_ps narrow::cast<narrow::Floats>
#define _mm512_cvtepi32_ps narrow::convert
#define _mm512_loadu_si512 narrow::load
#define _mm512_storeu_si512 narrow::store
#define _mm512_stream_si512 narrow::store
#define _mm512_and_si512 narrow::and_
#define _mm512_or_si512 narrow::or_
#define _mm512_xor_si512 narrow::xor_
#define _mm512_add_epi32 narrow::add
#define _mm512_sub_epi32 narrow::sub
#define _mm512_mullo_epi32 narrow::mullo
#define _mm512_min_epi32 narrow::min
#define _mm512_max_epi32 narrow::max
#define _mm512_srlv_epi32 narrow::srlv
#define _mm512_srli_epi32 narrow::srli
#define _mm512_slli_epi32 narrow::slli
#define _mm512_subs_epu16 narrow::subs16
#define _mm512_min_epu16 narrow::min16
#define _mm512_mulhi_epu16 narrow::mulhi16
#define _mm512_mul_ps narrow::mul
#define _mm512_sub_ps narrow::sub
#define _mm512_div_ps narrow::div
#define _mm512_fmadd_ps narrow::fma
#define _mm512_permutexvar_epi32 narrow::permute
#define _mm512_permutexvar_ps narrow::permute
#define _mm512_permutex2var_epi32 narrow::permute
#define _mm512_i32gather_epi32(at, from, scale) narrow::gathered<narrow::Ints>(at, from)
#define _mm512_i32gather_ps(at, from, scale) narrow::gathered<narrow::Floats>(at, from)
#define _mm512_mask_add_epi32 narrow::mask_add
#define _mm512_mask_xor_epi32 narrow::mask_xor
#define _mm512_mask_blend_epi32 narrow::blend
#define _mm512_cmpgt_epi32_mask narrow::greater
#define _mm512_cmplt_epu32_mask narrow::below
#define _mm512_cmp_ps_mask narrow::compare
#define _mm512_test_epi32_mask narrow::test
#define _mm512_cvtepi32_epi8 narrow::bytes
#define _mm512_cvtepu8_epi32 narrow::from_bytes
