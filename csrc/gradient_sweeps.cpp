// Sweeps of the backward pass over a gradient, in place or not, in the arithmetic of PyTorch's kernels: through a ReLU by
// a byte a value, and through a batch norm in training mode once its sums are known. And the sign bit of an encoded
// ReLU's output that says where its gradient does not pass.
#include "shoal_native.h"

#define SHOAL_INLINE inline __attribute__((always_inline))

namespace {

constexpr std::int64_t kPiece = 1 << 14;  // as many values as a thread takes at a time

SHOAL_INLINE void note(const float* x, std::int64_t count, float above, std::uint8_t* codes) {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
        const bool closed = (x[i] <= 0.0f) | (x[i] >= above);  // not of a NaN
        codes[i] = static_cast<std::uint8_t>((codes[i] & 0x7f) | (closed ? 0x80 : 0));
    }
}

SHOAL_INLINE void gate(const float* grad, const std::uint8_t* gates, std::int32_t above, std::int64_t count,
                       float* result) {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
        const float passes = grad[i];  // read in any case, or it would be a branch
        result[i] = gates[i] > above ? passes : 0.0f;
    }
}

using Norm = ShoalNormGradient;

// `fused` says whether the product is rounded before it is taken off: PyTorch's kernels differ in that.
template <bool kFused>
SHOAL_INLINE float through_norm(float grad, float x, float mean, float projection, float mean_grad, float invstd,
                                float weight) {
    const float centred = x - mean, rest = grad - mean_grad;
    return (kFused ? __builtin_fmaf(-centred, projection, rest) : rest - centred * projection) * invstd * weight;
}

template <bool kFused>
SHOAL_INLINE void row(const Norm& call, std::int64_t number) {
    const float *grad = call.grad + number * call.channels, *x = call.x + number * call.channels;
    const float *mean = call.mean, *projection = call.projection, *mean_grad = call.mean_grad;
    const float *invstd = call.invstd, *weight = call.weight;
    float* result = call.result + number * call.channels;
#pragma omp simd
    for (std::int64_t c = 0; c < call.channels; ++c)
        result[c] = through_norm<kFused>(grad[c], x[c], mean[c], projection[c], mean_grad[c], invstd[c], weight[c]);
}

using Part = void (*)(const Norm&, std::int64_t first, std::int64_t last);

struct Kernels {
    void (*note)(const float*, std::int64_t, float, std::uint8_t*);
    void (*gate)(const float*, const std::uint8_t*, std::int32_t, std::int64_t, float*);
    Part rows[2];  // the second fused
};

// The bodies above, built for one instruction set.
#define SHOAL_KERNELS(Level, target)                                                                             \
    struct Level {                                                                                               \
        target static void note_(const float* x, std::int64_t count, float above, std::uint8_t* codes) {         \
            note(x, count, above, codes);                                                                        \
        }                                                                                                        \
        target static void gate_(const float* grad, const std::uint8_t* gates, std::int32_t above,               \
                                 std::int64_t count, float* result) {                                            \
            gate(grad, gates, above, count, result);                                                             \
        }                                                                                                        \
        template <bool kFused>                                                                                   \
        target static void rows(const Norm& call, std::int64_t first, std::int64_t last) {                       \
            for (std::int64_t number = first; number < last; ++number) row<kFused>(call, number);                \
        }                                                                                                        \
        static constexpr Kernels kernels = {note_, gate_, {rows<false>, rows<true>}};                            \
    };

SHOAL_KERNELS(Portable, )
#if defined(__x86_64__)
SHOAL_KERNELS(Avx2, __attribute__((target("avx2,fma"))))
SHOAL_KERNELS(Avx512, __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl"))))
#endif

const Kernels& best_within(std::int32_t level) {
#if defined(__x86_64__)
    const std::uint64_t has = shoal_cpu_features();
    const std::uint64_t for_avx2 = SHOAL_AVX2 | SHOAL_FMA;
    const std::uint64_t for_avx512 = for_avx2 | SHOAL_AVX512F | SHOAL_AVX512BW | SHOAL_AVX512VL;
    if (level != 0 && level != 1 && (has & for_avx512) == for_avx512) return Avx512::kernels;
    if (level != 0 && (has & for_avx2) == for_avx2) return Avx2::kernels;
#endif
    (void)level;
    return Portable::kernels;
}

// body(first, count) for every piece of `elements` values.
template <typename Body>
void in_pieces(std::int64_t elements, std::int32_t threads, Body body) {
    const std::int64_t pieces = (elements + kPiece - 1) / kPiece;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
        const std::int64_t first = piece * kPiece;
        body(first, elements - first < kPiece ? elements - first : kPiece);
    }
}

}  // namespace

SHOAL_API void shoal_note_closed(const float* x, std::int64_t elements, float above, std::int32_t threads,
                                 std::int32_t level, std::uint8_t* codes) {
    const Kernels& run = best_within(level);
    in_pieces(elements, threads,
              [&](std::int64_t first, std::int64_t count) { run.note(x + first, count, above, codes + first); });
}

SHOAL_API void shoal_gate(const float* grad, const std::uint8_t* gates, std::int32_t above, std::int64_t elements,
                          std::int32_t threads, std::int32_t level, float* result) {
    const Kernels& run = best_within(level);
    in_pieces(elements, threads, [&](std::int64_t first, std::int64_t count) {
        run.gate(grad + first, gates + first, above, count, result + first);
    });
}

SHOAL_API void shoal_norm_gradient(const ShoalNormGradient* whole) {
    const Norm& call = *whole;
    const Kernels& run = best_within(call.level);
    const Part part = run.rows[call.fused != 0];
    const std::int64_t parts = call.threads;
#pragma omp parallel for schedule(static, 1) num_threads(call.threads) if (call.threads > 1)
    for (std::int64_t number = 0; number < parts; ++number)
        part(call, call.rows * number / parts, call.rows * (number + 1) / parts);
}
