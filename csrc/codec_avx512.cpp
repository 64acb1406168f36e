// The table codecs in AVX-512: as in AVX2, sixteen values at a time; decoding looks codes up in eight registers.
#if defined(__x86_64__)

#include <immintrin.h>

#include "codec_table.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl"))), apply_to = function)
#else
// GCC 12 begins its own intrinsics with a value that is not set.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl")
#endif

namespace shoal {
namespace {

constexpr int kLanes = 16;
using Ints = __m512i;
using Floats = __m512;

#include "codec_floats.h"

inline Ints all(std::int32_t value) { return _mm512_set1_epi32(value); }
inline Floats all(float value) { return _mm512_set1_ps(value); }
inline Ints ints(Floats a) { return _mm512_castps_si512(a); }
inline Floats floats(Ints a) { return _mm512_castsi512_ps(a); }
inline Floats as_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints load(const void* from) { return _mm512_loadu_si512(from); }
inline Ints load_pieces(const std::int32_t* from) {
    alignas(64) std::int32_t lanes[kLanes] = {};
    __builtin_memcpy(lanes, from, kPieces * sizeof(std::int32_t));
    return load(lanes);
}
inline Floats load_pieces(const float* from) {
    alignas(64) float lanes[kLanes] = {};
    __builtin_memcpy(lanes, from, kPieces * sizeof(float));
    return floats(load(lanes));
}
inline void store(std::uint32_t* to, Ints a) { _mm512_storeu_si512(to, a); }
inline Ints lane_numbers() {
    alignas(64) const std::int32_t lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(lanes);
}

inline Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints exclusive(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
inline Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints minus(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints times(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Ints least(Ints a, Ints b) { return _mm512_min_epi32(a, b); }
inline Ints greatest(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline Ints shifted_down(Ints a, Ints counts) { return _mm512_srlv_epi32(a, counts); }
template <int kBits>
inline Ints shifted_down(Ints a) {
    return _mm512_srli_epi32(a, kBits);
}
template <int kBits>
inline Ints shifted_up(Ints a) {
    return _mm512_slli_epi32(a, kBits);
}
inline Ints upper(Ints a) { return _mm512_srli_epi32(a, 16); }
inline Ints minus16(Ints a, Ints b) { return _mm512_subs_epu16(a, b); }
inline Ints least16(Ints a, Ints b) { return _mm512_min_epu16(a, b); }
inline Ints high_product16(Ints a, Ints b) { return _mm512_mulhi_epu16(a, b); }

inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats less(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats divided(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

inline Ints pick(Ints table, Ints at) { return _mm512_permutexvar_epi32(at, table); }
inline Floats pick(Floats table, Ints at) { return _mm512_permutexvar_ps(at, table); }
inline Ints gather(const std::int32_t* from, Ints at) { return _mm512_i32gather_epi32(at, from, 4); }
inline Floats gather(const float* from, Ints at) { return _mm512_i32gather_ps(at, from, 4); }

inline Ints next_if_greater(Ints number, Ints a, Ints than) {
    return _mm512_mask_add_epi32(number, _mm512_cmpgt_epi32_mask(a, than), number, _mm512_set1_epi32(1));
}
inline Ints next_if_at_most(Ints number, Floats a, Floats most) {
    return _mm512_mask_add_epi32(number, _mm512_cmp_ps_mask(a, most, _CMP_LE_OQ), number, _mm512_set1_epi32(1));
}
inline Ints next_if_less(Ints number, Floats a, Floats than) {
    return _mm512_mask_add_epi32(number, _mm512_cmp_ps_mask(a, than, _CMP_LT_OQ), number, _mm512_set1_epi32(1));
}
inline Ints chosen_if_greater(Ints a, Ints than, Ints yes, Ints no) {
    return _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(a, than), no, yes);
}

// Whether the lower half of a lane is less.
inline bool any_lower_less(Ints a, int than) {
    return _mm512_cmplt_epu32_mask(both(a, all(0xffff)), all(than));
}

// Codes of a group: the sign of x and the seven bits above the lower sixteen of each place.
inline void put_codes(const Ints* place, const float* x, std::uint8_t* codes) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        const Ints index = both(upper(place[v]), all(0x7f));
        const Ints sign = both(_mm512_srli_epi32(load(x + v * kLanes), 24), all(0x80));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + v * kLanes),
                         _mm512_cvtepi32_epi8(_mm512_or_si512(index, sign)));
    }
}

}  // namespace
}  // namespace shoal

#include "codec_vectors.h"

namespace shoal {
namespace {

void decode(const float* values, const std::uint8_t* codes, std::int64_t count, bool stream, float* out) {
    std::int64_t i = 0;
    if (stream)
        for (; i < count && (reinterpret_cast<std::uintptr_t>(out + i) & 63); ++i) out[i] = values[codes[i]];
    if (i + kLanes <= count) {
        Ints table[8];  // of the magnitudes; codes from 128 on are their negatives, or NaN as they are
#pragma GCC unroll 8
        for (int part = 0; part < 8; ++part) table[part] = load(values + part * kLanes);
        const Ints sign = all(static_cast<std::int32_t>(bits_of(values[128]) ^ bits_of(values[0])));
        for (; i + kLanes <= count; i += kLanes) {
            const Ints code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
            // Five bits choose among two registers, two more among the four pairs.
            const Ints low = _mm512_permutex2var_epi32(table[0], code, table[1]);
            const Ints second = _mm512_permutex2var_epi32(table[2], code, table[3]);
            const Ints third = _mm512_permutex2var_epi32(table[4], code, table[5]);
            const Ints fourth = _mm512_permutex2var_epi32(table[6], code, table[7]);
            const auto odd = _mm512_test_epi32_mask(code, all(32));
            const Ints lower = _mm512_mask_blend_epi32(odd, low, second);
            const Ints higher = _mm512_mask_blend_epi32(odd, third, fourth);
            const Ints value = _mm512_mask_blend_epi32(_mm512_test_epi32_mask(code, all(64)), lower, higher);
            const Ints signed_value =
                _mm512_mask_xor_epi32(value, _mm512_test_epi32_mask(code, all(128)), value, sign);
            if (stream) _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), signed_value);
            else _mm512_storeu_si512(out + i, signed_value);
        }
    }
    for (; i < count; ++i) out[i] = values[codes[i]];
    if (stream) _mm_sfence();
}

constexpr CodecLevel kLevel = {&largest, &encode, &draw, &signs, &decode};

}  // namespace
}  // namespace shoal

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace shoal {

const CodecLevel& avx512_codec() { return kLevel; }

}  // namespace shoal

#endif
