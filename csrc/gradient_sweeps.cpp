// Sweeps of the backward pass over a gradient, in place or not, in the arithmetic of PyTorch's kernels: through a ReLU by
// a byte a value, and through a batch norm in training mode once its sums are known. And the sign bit of an encoded
// ReLU's output that says where its gradient does not pass.
#include "shoal_native.h"
#include "stored_floats.h"

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

template <typename Stored, bool kFused>
SHOAL_INLINE void row(const Norm& call, std::int64_t number) {
    const std::int64_t first = number * call.channels;
    const Stored *grad = static_cast<const Stored*>(call.grad) + first, *x = static_cast<const Stored*>(call.x) + first;
    const float *mean = call.mean, *mean_grad = call.scratch, *projection = call.scratch + call.channels;
    const float *invstd = call.invstd, *weight = call.weight;
    Stored* result = static_cast<Stored*>(call.result) + first;
#pragma omp simd
    for (std::int64_t c = 0; c < call.channels; ++c)
        shoal::write(result + c, through_norm<kFused>(shoal::read(grad + c), shoal::read(x + c), mean[c], projection[c],
                                                      mean_grad[c], invstd[c], weight[c]));
}

using Part = void (*)(const Norm&, std::int64_t first, std::int64_t last);

struct Kernels {
    void (*note)(const float*, std::int64_t, float, std::uint8_t*);
    void (*gate)(const float*, const std::uint8_t*, std::int32_t, std::int64_t, float*);
    Part rows[2][2];  // of float32 and of bfloat16; the second of each fused
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
        template <typename Stored, bool kFused>                                                                  \
        target static void rows(const Norm& call, std::int64_t first, std::int64_t last) {                       \
            for (std::int64_t number = first; number < last; ++number) row<Stored, kFused>(call, number);        \
        }                                                                                                        \
        static constexpr Kernels kernels = {note_,                                                               \
                                            gate_,                                                               \
                                            {{rows<float, false>, rows<float, true>},                            \
                                             {rows<std::uint16_t, false>, rows<std::uint16_t, true>}}};          \
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
    const Part part = run.rows[call.bfloat16 != 0][call.fused != 0];
    const std::int64_t parts = call.threads;
    const float rows = static_cast<float>(call.rows);
    for (std::int64_t c = 0; c < call.channels; ++c) {
        call.scratch[c] = call.of_bias[c] / rows;
        call.scratch[call.channels + c] = call.of_weight[c] * call.invstd[c] / rows;
    }
#pragma omp parallel for schedule(static, 1) num_threads(call.threads) if (call.threads > 1)
    for (std::int64_t number = 0; number < parts; ++number)
        part(call, call.rows * number / parts, call.rows * (number + 1) / parts);
}
