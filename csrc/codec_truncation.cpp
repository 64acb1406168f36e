// The top bytes of float32 and back, at the speed of memory: no more than AVX2, the rest waits for it anyway.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "codec_table.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define SHOAL_AVX2_CODE __attribute__((target("avx2")))
#endif

namespace {

using Call = ShoalTruncation;

constexpr std::uint32_t kInfinity = 0x7f800000, kMagnitude = 0x7fffffff, kQuiet = 0x00400000;

// Elements `first` to `last`.
using Kernel = void (*)(const Call&, std::int64_t first, std::int64_t last);

template <int kWidth, bool kNearest>
std::uint32_t kept(std::uint32_t bits) {
    constexpr int kDropped = 32 - 8 * kWidth;
    const std::uint32_t magnitude = bits & kMagnitude;
    std::uint32_t chosen = magnitude;
    if (magnitude > kInfinity) {
        chosen = magnitude | kQuiet;
    } else if (kNearest && magnitude < kInfinity) {
        const std::uint32_t code = magnitude >> kDropped;
        chosen += (code & 1) + (1u << (kDropped - 1)) - 1;
        // One byte is a power of four: the middle of 1 and 4 is 2.5, not half of the bits; that of 0 and 2^-125 is.
        if (kWidth == 1 && code) chosen -= 0x200000;
    }
    return (chosen | (bits & ~kMagnitude)) >> kDropped;
}

template <int kWidth, bool kNearest>
void pack(const Call& call, std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, call.values + i, sizeof bits);
        bits = kept<kWidth, kNearest>(bits);
        for (int byte = 0; byte < kWidth; ++byte)
            call.packed[i * kWidth + byte] = static_cast<std::uint8_t>(bits >> (8 * byte));
    }
}

template <int kWidth>
void unpack(const Call& call, std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
        std::uint32_t bits = 0;
        for (int byte = 0; byte < kWidth; ++byte)
            bits |= std::uint32_t{call.packed[i * kWidth + byte]} << (8 * (4 - kWidth + byte));
        if (kWidth == 1 && (bits & kMagnitude) == 0x7f000000) bits |= kInfinity | kQuiet;
        std::memcpy(call.values + i, &bits, sizeof bits);
    }
}

#if defined(__x86_64__)

using Ints = __m256i;

// The kept bits, in the low end of each lane.
template <int kWidth, bool kNearest>
SHOAL_AVX2_CODE inline Ints kept_lanes(const float* values) {
    constexpr int kDropped = 32 - 8 * kWidth;
    const Ints bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    const Ints magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(kMagnitude));
    const Ints infinity = _mm256_set1_epi32(kInfinity);
    const Ints is_nan = _mm256_cmpgt_epi32(magnitude, infinity);
    Ints chosen = bits;
    if (kNearest) {
        const Ints code = _mm256_srli_epi32(magnitude, kDropped);
        Ints more = _mm256_add_epi32(_mm256_and_si256(code, _mm256_set1_epi32(1)),
                                     _mm256_set1_epi32((1 << (kDropped - 1)) - 1));
        if (kWidth == 1) {
            const Ints is_code = _mm256_cmpgt_epi32(code, _mm256_setzero_si256());
            more = _mm256_sub_epi32(more, _mm256_and_si256(is_code, _mm256_set1_epi32(0x200000)));
        }
        const Ints is_finite = _mm256_cmpgt_epi32(infinity, magnitude);
        chosen = _mm256_add_epi32(bits, _mm256_and_si256(more, is_finite));  // no carry reaches the sign
    }
    chosen = _mm256_or_si256(chosen, _mm256_and_si256(is_nan, _mm256_set1_epi32(kQuiet)));
    return _mm256_srli_epi32(chosen, kDropped);
}

// Three bytes of each of eight values, in dwords 0, 1, 2 and 4, 5, 6.
template <bool kNearest>
SHOAL_AVX2_CODE inline Ints three_bytes(const float* values) {
    const Ints close = _mm256_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1, 0, 1, 2, 4, 5, 6, 8, 9,
                                        10, 12, 13, 14, -1, -1, -1, -1);
    return _mm256_shuffle_epi8(kept_lanes<3, kNearest>(values), close);
}

// Thirty-two values to three whole vectors that pass the caches by; where it ended.
template <bool kNearest>
SHOAL_AVX2_CODE std::int64_t stream_three(const Call& call, std::int64_t first, std::int64_t last) {
    const auto address = reinterpret_cast<std::uintptr_t>(call.packed);
    std::int64_t i = first;
    while (i < last && (address + 3 * i) % 32 != 0) ++i;
    pack<3, kNearest>(call, first, i);
    const Ints a = _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 0, 0), b = _mm256_setr_epi32(2, 4, 5, 6, 0, 0, 0, 1);
    const Ints c = _mm256_setr_epi32(5, 6, 0, 0, 0, 1, 2, 4), d = _mm256_setr_epi32(0, 0, 0, 1, 2, 4, 5, 6);
    for (; i + 32 <= last; i += 32) {
        const float* x = call.values + i;
        const Ints one = _mm256_permutevar8x32_epi32(three_bytes<kNearest>(x), a);
        const Ints two = _mm256_permutevar8x32_epi32(three_bytes<kNearest>(x + 8), b);
        const Ints three = _mm256_permutevar8x32_epi32(three_bytes<kNearest>(x + 16), c);
        const Ints four = _mm256_permutevar8x32_epi32(three_bytes<kNearest>(x + 24), d);
        const auto to = reinterpret_cast<__m256i*>(call.packed + 3 * i);
        _mm256_stream_si256(to, _mm256_blend_epi32(one, two, 0xc0));
        _mm256_stream_si256(to + 1, _mm256_blend_epi32(two, three, 0xf0));
        _mm256_stream_si256(to + 2, _mm256_blend_epi32(three, four, 0xfc));
    }
    _mm_sfence();
    return i;
}

template <int kWidth, bool kNearest>
SHOAL_AVX2_CODE void pack_avx2(const Call& call, std::int64_t first, std::int64_t last) {
    std::int64_t i = first;
    if (kWidth == 1) {
        const Ints order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        for (; i + 32 <= last; i += 32) {
            const float* x = call.values + i;
            const Ints low = _mm256_packus_epi32(kept_lanes<kWidth, kNearest>(x), kept_lanes<kWidth, kNearest>(x + 8));
            const Ints high =
                _mm256_packus_epi32(kept_lanes<kWidth, kNearest>(x + 16), kept_lanes<kWidth, kNearest>(x + 24));
            const Ints bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(call.packed + i), bytes);
        }
    } else if (kWidth == 2) {
        for (; i + 16 <= last; i += 16) {
            const float* x = call.values + i;
            const Ints both = _mm256_packus_epi32(kept_lanes<kWidth, kNearest>(x), kept_lanes<kWidth, kNearest>(x + 8));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(call.packed + 2 * i), _mm256_permute4x64_epi64(both, 0xd8));
        }
    } else {
        const Ints join = _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 7, 7);
        if (call.elements >= shoal::kStreamed) i = stream_three<kNearest>(call, i, last);
        // Each store writes eight bytes that the next one overwrites.
        for (; i + 11 <= last; i += 8) {
            const Ints halves = three_bytes<kNearest>(call.values + i);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(call.packed + 3 * i),
                                _mm256_permutevar8x32_epi32(halves, join));
        }
    }
    pack<kWidth, kNearest>(call, i, last);
}

template <int kWidth>
SHOAL_AVX2_CODE void unpack_avx2(const Call& call, std::int64_t first, std::int64_t last) {
    std::int64_t i = first;
    if (kWidth == 1) {
        const Ints magnitude = _mm256_set1_epi32(kMagnitude), most = _mm256_set1_epi32(0x7effffff);
        for (; i + 8 <= last; i += 8) {
            const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(call.packed + i));
            const Ints bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 24);
            const Ints is_nan = _mm256_cmpgt_epi32(_mm256_and_si256(bits, magnitude), most);
            const Ints value = _mm256_or_si256(bits, _mm256_and_si256(is_nan, _mm256_set1_epi32(kInfinity | kQuiet)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(call.values + i), value);
        }
    } else if (kWidth == 2) {
        for (; i + 8 <= last; i += 8) {
            const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(call.packed + 2 * i));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(call.values + i),
                                _mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
        }
    } else {
        const Ints open = _mm256_setr_epi8(-1, 0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1, 4, 5, 6, -1, 7, 8,
                                           9, -1, 10, 11, 12, -1, 13, 14, 15);
        // The second half of eight values begins four bytes before itself, so that nothing past them is read.
        for (; i + 8 <= last; i += 8) {
            const std::uint8_t* from = call.packed + 3 * i;
            const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
            const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(call.values + i),
                                _mm256_shuffle_epi8(_mm256_set_m128i(high, low), open));
        }
    }
    unpack<kWidth>(call, i, last);
}

#endif

Kernel packer(const Call& call, bool has_avx2) {
    const int which = 2 * (call.width - 1) + (call.nearest != 0);
#if defined(__x86_64__)
    constexpr Kernel wide[] = {&pack_avx2<1, false>, &pack_avx2<1, true>,  &pack_avx2<2, false>,
                               &pack_avx2<2, true>,  &pack_avx2<3, false>, &pack_avx2<3, true>};
    if (has_avx2) return wide[which];
#endif
    (void)has_avx2;
    constexpr Kernel narrow[] = {&pack<1, false>, &pack<1, true>,  &pack<2, false>,
                                 &pack<2, true>,  &pack<3, false>, &pack<3, true>};
    return narrow[which];
}

Kernel unpacker(const Call& call, bool has_avx2) {
#if defined(__x86_64__)
    constexpr Kernel wide[] = {&unpack_avx2<1>, &unpack_avx2<2>, &unpack_avx2<3>};
    if (has_avx2) return wide[call.width - 1];
#endif
    (void)has_avx2;
    constexpr Kernel narrow[] = {&unpack<1>, &unpack<2>, &unpack<3>};
    return narrow[call.width - 1];
}

void sweep(const Call& call, Kernel run) {
    const std::int64_t parts = call.threads;
#pragma omp parallel for num_threads(call.threads) schedule(static, 1)
    for (std::int64_t part = 0; part < parts; ++part)
        run(call, call.elements * part / parts, call.elements * (part + 1) / parts);
}

}  // namespace

SHOAL_API std::int32_t shoal_truncation_pack(const ShoalTruncation* call) {
    const shoal::CodecLevel* level = shoal::codec_level(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    sweep(*call, packer(*call, level != &shoal::portable_codec()));
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_truncation_unpack(const ShoalTruncation* call) {
    const shoal::CodecLevel* level = shoal::codec_level(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    sweep(*call, unpacker(*call, level != &shoal::portable_codec()));
    return SHOAL_DONE;
}
