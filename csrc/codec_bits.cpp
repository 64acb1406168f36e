// Codecs of one bit a value: the signs and two means, and whether a value is positive. No more than AVX2: they are as
// fast as memory.
//
// Means are sums in an order of their own, the same everywhere: doubles, in runs of 4096 values of the block; within a
// run 64 lanes each add every 64th value to 0, lanes are folded by halves, and runs are added in order.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "codec_table.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define SHOAL_AVX2_CODE __attribute__((target("avx2")))
#endif

namespace {

using Call = ShoalBits;

constexpr std::int64_t kRun = 4096;
constexpr int kLanes = 64;
constexpr std::int64_t kShared = 1 << 16;  // elements of a block that all threads work on

// What a run, or a block, adds up to.
struct Sums {
    double of_others = 0, of_negatives = 0;
    std::int64_t negatives = 0;
    bool has_nan = false;

    void add(const Sums& run) {
        of_others += run.of_others;
        of_negatives += run.of_negatives;
        negatives += run.negatives;
        has_nan |= run.has_nan;
    }
};

double folded(double* lanes) {
    for (int half = kLanes / 2; half; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

void add_values(const float* x, std::int64_t count, double* others, double* negatives, Sums& sums) {
    for (std::int64_t i = 0; i < count; ++i) {
        const bool negative = x[i] < 0;
        others[i % kLanes] += negative ? 0.0 : double(x[i]);
        negatives[i % kLanes] += negative ? double(x[i]) : 0.0;
        sums.negatives += negative;
        sums.has_nan |= x[i] != x[i];
    }
}

template <bool kPositive>
void flag(const float* x, std::int64_t count, std::uint8_t* bits) {
    for (std::int64_t i = 0; i < count; i += 8) {
        unsigned byte = 0;
        for (std::int64_t bit = 0; bit < std::min<std::int64_t>(8, count - i); ++bit)
            byte |= unsigned{kPositive ? x[i + bit] > 0 : x[i + bit] < 0} << bit;
        bits[i / 8] = static_cast<std::uint8_t>(byte);
    }
}

// One of two values for each bit.
template <typename Value>
void choose(const std::uint8_t* bits, std::int64_t count, const Value* values, Value* out) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = values[bits[i / 8] >> (i % 8) & 1];
}

#if defined(__x86_64__)

SHOAL_AVX2_CODE void add_values_avx2(const float* x, std::int64_t count, double* others, double* negatives,
                                     Sums& sums) {
    const std::int64_t rows = count / kLanes;
    __m256i counted = _mm256_setzero_si256();
    __m256 nan = _mm256_setzero_ps();
    for (int lane = 0; lane < kLanes; lane += 8) {
        __m256d above[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()}, below[2] = {above[0], above[0]};
        for (std::int64_t row = 0; row < rows; ++row) {
            const __m256 value = _mm256_loadu_ps(x + row * kLanes + lane);
            const __m256 negative = _mm256_cmp_ps(value, _mm256_setzero_ps(), _CMP_LT_OQ);
            const __m256 high = _mm256_andnot_ps(negative, value), low = _mm256_and_ps(negative, value);
            above[0] = _mm256_add_pd(above[0], _mm256_cvtps_pd(_mm256_castps256_ps128(high)));
            above[1] = _mm256_add_pd(above[1], _mm256_cvtps_pd(_mm256_extractf128_ps(high, 1)));
            below[0] = _mm256_add_pd(below[0], _mm256_cvtps_pd(_mm256_castps256_ps128(low)));
            below[1] = _mm256_add_pd(below[1], _mm256_cvtps_pd(_mm256_extractf128_ps(low, 1)));
            counted = _mm256_sub_epi32(counted, _mm256_castps_si256(negative));
            nan = _mm256_or_ps(nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
        }
        for (int half = 0; half < 2; ++half) {
            _mm256_storeu_pd(others + lane + 4 * half, above[half]);
            _mm256_storeu_pd(negatives + lane + 4 * half, below[half]);
        }
    }
    alignas(32) std::int32_t counts[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(counts), counted);
    for (const std::int32_t lane : counts) sums.negatives += lane;
    sums.has_nan |= _mm256_movemask_ps(nan) != 0;
    add_values(x + rows * kLanes, count - rows * kLanes, others, negatives, sums);
}

template <bool kPositive>
SHOAL_AVX2_CODE inline __m256i flags_of(const float* x) {
    return _mm256_castps_si256(
        _mm256_cmp_ps(_mm256_loadu_ps(x), _mm256_setzero_ps(), kPositive ? _CMP_GT_OQ : _CMP_LT_OQ));
}

template <bool kPositive>
SHOAL_AVX2_CODE void flag_avx2(const float* x, std::int64_t count, std::uint8_t* bits) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    std::int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m256i low = _mm256_packs_epi32(flags_of<kPositive>(x + i), flags_of<kPositive>(x + i + 8));
        const __m256i high = _mm256_packs_epi32(flags_of<kPositive>(x + i + 16), flags_of<kPositive>(x + i + 24));
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        const int found = _mm256_movemask_epi8(bytes);
        __builtin_memcpy(bits + i / 8, &found, sizeof found);
    }
    flag<kPositive>(x + i, count - i, bits + i / 8);
}

SHOAL_AVX2_CODE void choose_floats_avx2(const std::uint8_t* bits, std::int64_t count, const float* values,
                                        float* out) {
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256 clear = _mm256_set1_ps(values[0]), set = _mm256_set1_ps(values[1]);
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256i bit = _mm256_and_si256(_mm256_set1_epi32(bits[i / 8]), each);
        const __m256 is_set = _mm256_castsi256_ps(_mm256_cmpeq_epi32(bit, each));
        _mm256_storeu_ps(out + i, _mm256_blendv_ps(clear, set, is_set));
    }
    choose(bits + i / 8, count - i, values, out + i);
}

SHOAL_AVX2_CODE void choose_bytes_avx2(const std::uint8_t* bits, std::int64_t count, const std::uint8_t* values,
                                       std::uint8_t* out) {
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i each = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
    const __m256i clear = _mm256_set1_epi8(static_cast<char>(values[0]));
    const __m256i set = _mm256_set1_epi8(static_cast<char>(values[1]));
    std::int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        int four;
        __builtin_memcpy(&four, bits + i / 8, sizeof four);
        const __m256i bit = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(four), spread), each);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                            _mm256_blendv_epi8(clear, set, _mm256_cmpeq_epi8(bit, each)));
    }
    choose(bits + i / 8, count - i, values, out + i);
}

#endif

// The bodies above, for one instruction set each.
struct Kernels {
    void (*add_values)(const float*, std::int64_t, double*, double*, Sums&);
    void (*flag_negative)(const float*, std::int64_t, std::uint8_t*);
    void (*flag_positive)(const float*, std::int64_t, std::uint8_t*);
    void (*choose_floats)(const std::uint8_t*, std::int64_t, const float*, float*);
    void (*choose_bytes)(const std::uint8_t*, std::int64_t, const std::uint8_t*, std::uint8_t*);
};

constexpr Kernels portable = {&add_values, &flag<false>, &flag<true>, &choose<float>, &choose<std::uint8_t>};
#if defined(__x86_64__)
constexpr Kernels avx2 = {&add_values_avx2, &flag_avx2<false>, &flag_avx2<true>, &choose_floats_avx2,
                          &choose_bytes_avx2};
#endif

const Kernels* kernels(std::int32_t number) {
    const shoal::CodecLevel* level = shoal::codec_level(number);
    if (!level) return nullptr;
#if defined(__x86_64__)
    if (level != &shoal::portable_codec()) return &avx2;
#endif
    return &portable;
}

// Sums and bits of a run, while it is in the cache.
Sums encode_run(const Kernels& run, const float* x, std::int64_t count, std::uint8_t* bits) {
    double others[kLanes] = {}, negatives[kLanes] = {};
    Sums sums;
    run.add_values(x, count, others, negatives, sums);
    sums.of_others = folded(others);
    sums.of_negatives = folded(negatives);
    run.flag_negative(x, count, bits);
    return sums;
}

void put_means(const Sums& sums, std::int64_t count, float* means) {
    const std::int64_t others = count - sums.negatives;
    means[0] = others ? float(sums.of_others / double(others)) : 0.0f;
    means[1] = sums.negatives ? float(sums.of_negatives / double(sums.negatives)) : 0.0f;
    if (sums.has_nan) means[0] = means[1] = std::numeric_limits<float>::quiet_NaN();
}

void encode_block(const Call& call, const Kernels& run, std::int64_t block) {
    const std::int64_t first = block * call.block_elements;
    const std::int64_t last = std::min(first + call.block_elements, call.elements);
    Sums sums;
    for (std::int64_t begin = first; begin < last; begin += kRun)
        sums.add(encode_run(run, call.values + begin, std::min(kRun, last - begin), call.bits + begin / 8));
    put_means(sums, last - first, call.means + 2 * block);
}

// All threads on one block.
void encode_large(const Call& call, const Kernels& run, std::int64_t block) {
    const std::int64_t first = block * call.block_elements;
    const std::int64_t last = std::min(first + call.block_elements, call.elements);
    const std::int64_t runs = (last - first + kRun - 1) / kRun;
    std::vector<Sums> parts(static_cast<std::size_t>(runs));
#pragma omp parallel for num_threads(call.threads) schedule(static)
    for (std::int64_t part = 0; part < runs; ++part) {
        const std::int64_t begin = first + part * kRun;
        parts[static_cast<std::size_t>(part)] =
            encode_run(run, call.values + begin, std::min(kRun, last - begin), call.bits + begin / 8);
    }
    Sums sums;
    for (const Sums& part : parts) sums.add(part);
    put_means(sums, last - first, call.means + 2 * block);
}

// Elements in parts that begin at whole bytes.
template <typename Body>
void in_parts(const Call& call, Body body) {
    const std::int64_t bytes = (call.elements + 7) / 8, parts = call.threads;
#pragma omp parallel for num_threads(call.threads) schedule(static, 1)
    for (std::int64_t part = 0; part < parts; ++part)
        body(8 * (bytes * part / parts), std::min(8 * (bytes * (part + 1) / parts), call.elements));
}

}  // namespace

SHOAL_API std::int32_t shoal_one_bit_encode(const ShoalBits* call) {
    const Kernels* run = kernels(call->level);
    if (!run) return SHOAL_NO_SUCH_LEVEL;
    const std::int64_t blocks = (call->elements + call->block_elements - 1) / call->block_elements;
    if (call->threads > 1 && call->block_elements > kShared && blocks < 4 * call->threads) {
        for (std::int64_t block = 0; block < blocks; ++block) encode_large(*call, *run, block);
        return SHOAL_DONE;
    }
#pragma omp parallel for num_threads(call->threads) schedule(static)
    for (std::int64_t block = 0; block < blocks; ++block) encode_block(*call, *run, block);
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_one_bit_decode(const ShoalBits* call) {
    const Kernels* run = kernels(call->level);
    if (!run) return SHOAL_NO_SUCH_LEVEL;
    in_parts(*call, [&](std::int64_t first, std::int64_t last) {
        while (first < last) {
            const std::int64_t block = first / call->block_elements;
            const std::int64_t end = std::min(last, (block + 1) * call->block_elements);
            run->choose_floats(call->bits + first / 8, end - first, call->means + 2 * block, call->values + first);
            first = end;
        }
    });
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_sign_mask_encode(const ShoalBits* call) {
    const Kernels* run = kernels(call->level);
    if (!run) return SHOAL_NO_SUCH_LEVEL;
    in_parts(*call, [&](std::int64_t first, std::int64_t last) {
        run->flag_positive(call->values + first, last - first, call->bits + first / 8);
    });
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_sign_mask_decode(const ShoalBits* call) {
    const Kernels* run = kernels(call->level);
    if (!run) return SHOAL_NO_SUCH_LEVEL;
    constexpr std::uint8_t kFlags[] = {0, 1};
    in_parts(*call, [&](std::int64_t first, std::int64_t last) {
        run->choose_bytes(call->bits + first / 8, last - first, kFlags, call->flags + first);
    });
    return SHOAL_DONE;
}
