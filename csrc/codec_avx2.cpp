// The table codecs in AVX2: tables of eight pieces are looked up in one register.
#if defined(__x86_64__)

#include <immintrin.h>

#include "codec_table.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace shoal {
namespace {

constexpr int kLanes = 8;
using Ints = __m256i;
using Floats = __m256;

#include "codec_floats.h"

inline Ints all(std::int32_t value) { return _mm256_set1_epi32(value); }
inline Floats all(float value) { return _mm256_set1_ps(value); }
inline Ints ints(Floats a) { return _mm256_castps_si256(a); }
inline Floats floats(Ints a) { return _mm256_castsi256_ps(a); }
inline Floats as_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Ints load(const float* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Ints load_pieces(const std::int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Floats load_pieces(const float* from) { return _mm256_loadu_ps(from); }
inline void store(std::uint32_t* to, Ints a) { _mm256_store_si256(reinterpret_cast<__m256i*>(to), a); }
inline Ints lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

inline Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints exclusive(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
inline Ints plus(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints minus(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Ints times(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Ints least(Ints a, Ints b) { return _mm256_min_epi32(a, b); }
inline Ints greatest(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
inline Ints shifted_down(Ints a, Ints counts) { return _mm256_srlv_epi32(a, counts); }
template <int kBits>
inline Ints shifted_down(Ints a) {
    return _mm256_srli_epi32(a, kBits);
}
template <int kBits>
inline Ints shifted_up(Ints a) {
    return _mm256_slli_epi32(a, kBits);
}
inline Ints upper(Ints a) { return _mm256_srli_epi32(a, 16); }
inline Ints minus16(Ints a, Ints b) { return _mm256_subs_epu16(a, b); }
inline Ints least16(Ints a, Ints b) { return _mm256_min_epu16(a, b); }
inline Ints high_product16(Ints a, Ints b) { return _mm256_mulhi_epu16(a, b); }

inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats less(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats divided(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

inline Ints pick(Ints table, Ints at) { return _mm256_permutevar8x32_epi32(table, at); }
inline Floats pick(Floats table, Ints at) { return _mm256_permutevar8x32_ps(table, at); }
// Loads and inserts: fewer steps than the processor's own gather takes.
inline Floats gather(const float* from, Ints at) {
    alignas(32) std::uint32_t place[kLanes];
    store(place, at);
    __m128 low = _mm_load_ss(from + place[0]), high = _mm_load_ss(from + place[4]);
    low = _mm_insert_ps(low, _mm_load_ss(from + place[1]), 0x10);
    high = _mm_insert_ps(high, _mm_load_ss(from + place[5]), 0x10);
    low = _mm_insert_ps(low, _mm_load_ss(from + place[2]), 0x20);
    high = _mm_insert_ps(high, _mm_load_ss(from + place[6]), 0x20);
    low = _mm_insert_ps(low, _mm_load_ss(from + place[3]), 0x30);
    high = _mm_insert_ps(high, _mm_load_ss(from + place[7]), 0x30);
    return _mm256_set_m128(high, low);
}
inline Ints gather(const std::int32_t* from, Ints at) { return ints(gather(reinterpret_cast<const float*>(from), at)); }

inline Ints next_if_greater(Ints number, Ints a, Ints than) {
    return _mm256_sub_epi32(number, _mm256_cmpgt_epi32(a, than));
}
inline Ints next_if_at_most(Ints number, Floats a, Floats most) {
    return _mm256_sub_epi32(number, ints(_mm256_cmp_ps(a, most, _CMP_LE_OQ)));
}
inline Ints next_if_less(Ints number, Floats a, Floats than) {
    return _mm256_sub_epi32(number, ints(_mm256_cmp_ps(a, than, _CMP_LT_OQ)));
}
inline Ints chosen_if_greater(Ints a, Ints than, Ints yes, Ints no) {
    return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(a, than));
}

// Whether the lower half of a lane is less.
inline bool any_lower_less(Ints a, int than) {
    const Ints least = _mm256_min_epu16(a, _mm256_set1_epi32(than - 1));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi16(least, a)) & 0x33333333;
}

// Codes of a group: the sign of x and the seven bits above the lower sixteen of each place.
inline void put_codes(const Ints* place, const float* x, std::uint8_t* codes) {
    const Ints seven = _mm256_set1_epi16(0x7f);
    const Ints first = _mm256_packus_epi32(upper(place[0]), upper(place[1]));
    const Ints second = _mm256_packus_epi32(upper(place[2]), upper(place[3]));
    const Ints index = _mm256_packus_epi16(both(first, seven), both(second, seven));
    // Packing keeps signs.
    const Ints sign = _mm256_packs_epi16(_mm256_packs_epi32(load(x), load(x + kLanes)),
                                         _mm256_packs_epi32(load(x + 2 * kLanes), load(x + 3 * kLanes)));
    const Ints mixed = _mm256_or_si256(index, both(sign, _mm256_set1_epi8(-128)));
    const Ints inorder = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), inorder);
}

}  // namespace
}  // namespace shoal

#include "codec_vectors.h"

namespace shoal {
namespace {

// Eight loads and inserts: in fewer steps than the processor's own gather.
inline Floats eight_of(const float* values, const std::uint8_t* codes) {
    std::uint64_t all;
    __builtin_memcpy(&all, codes, sizeof all);
    __m128 low = _mm_load_ss(values + (all & 0xff)), high = _mm_load_ss(values + (all >> 32 & 0xff));
    low = _mm_insert_ps(low, _mm_load_ss(values + (all >> 8 & 0xff)), 0x10);
    high = _mm_insert_ps(high, _mm_load_ss(values + (all >> 40 & 0xff)), 0x10);
    low = _mm_insert_ps(low, _mm_load_ss(values + (all >> 16 & 0xff)), 0x20);
    high = _mm_insert_ps(high, _mm_load_ss(values + (all >> 48 & 0xff)), 0x20);
    low = _mm_insert_ps(low, _mm_load_ss(values + (all >> 24 & 0xff)), 0x30);
    high = _mm_insert_ps(high, _mm_load_ss(values + (all >> 56)), 0x30);
    return _mm256_set_m128(high, low);
}

void decode(const float* values, const std::uint8_t* codes, std::int64_t count, bool stream, float* out) {
    std::int64_t i = 0;
    if (stream) {
        for (; i < count && (reinterpret_cast<std::uintptr_t>(out + i) & 31); ++i) out[i] = values[codes[i]];
        for (; i + kLanes <= count; i += kLanes) _mm256_stream_ps(out + i, eight_of(values, codes + i));
        _mm_sfence();
    }
    for (; i + kLanes <= count; i += kLanes) _mm256_storeu_ps(out + i, eight_of(values, codes + i));
    for (; i < count; ++i) out[i] = values[codes[i]];
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

const CodecLevel& avx2_codec() { return kLevel; }

}  // namespace shoal

#endif
