// Batch norm and its activation as one sweep, and their backward from the pair's result y: z is what was activated, made
// again from y, and dz its gradient. Two sweeps over y and the gradient, the sums first, then the result, which may lie
// over the gradient.
//
// Sums run in floats over a block of pixels and in doubles from block to block.
#include <algorithm>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "invertible_activations.h"
#include "shoal_native.h"

#if defined(__clang__)
#define SHOAL_EACH_BY_ITSELF _Pragma("clang loop vectorize(assume_safety)")
#else
#define SHOAL_EACH_BY_ITSELF _Pragma("GCC ivdep")
#endif

namespace {

constexpr std::int64_t kBlock = 64;  // pixels of a plane summed in floats, in 4 to 16 sums side by side
// Rows summed in floats, in one sum a channel: where all gradients are alike, so are the roundings of longer sums, and
// what is taken off every pixel leaves them there.
constexpr std::int64_t kRows = 16;
constexpr std::int64_t kMaxChannels = 512;  // summed at once: two floats each stay in L1

using Call = ShoalInvertedBatchNorm;

template <typename Activation>
SHOAL_INLINE void row_forward(const Call& call, std::int64_t first, std::int64_t last) {
    const Activation activation(call.slope);
    const std::int64_t channels = call.channels;
    const float *mean = call.mean, *shift = call.shift, *scale = call.scale;
    for (std::int64_t row = first; row < last; ++row) {
        const float* x = call.y + row * channels;
        float* result = call.result + row * channels;
        SHOAL_EACH_BY_ITSELF
        for (std::int64_t c = 0; c < channels; ++c) result[c] = activation.of((x[c] - mean[c]) * scale[c] + shift[c]);
    }
}

// Pixels in NHWC order from `first` to `last`.
template <typename Activation>
SHOAL_INLINE void row_sums(const Call& call, std::int64_t first, std::int64_t last, double* sum, double* centred) {
    const Activation activation(call.slope);
    const std::int64_t channels = call.channels;
    float part[kMaxChannels], part_centred[kMaxChannels];
    for (std::int64_t begin = 0; begin < channels; begin += kMaxChannels) {
        const std::int64_t width = std::min(kMaxChannels, channels - begin);
        const float* shift = call.shift + begin;
        for (std::int64_t block = first; block < last; block += kRows) {
            std::fill(part, part + width, 0.0f);
            std::fill(part_centred, part_centred + width, 0.0f);
            for (std::int64_t row = block; row < std::min(last, block + kRows); ++row) {
                const float* y = call.y + row * channels + begin;
                const float* grad = call.grad + row * channels + begin;
                SHOAL_EACH_BY_ITSELF
                for (std::int64_t c = 0; c < width; ++c) {
                    const float dz = activation.gradient(y[c], grad[c]);
                    part[c] += dz;
                    part_centred[c] += dz * (activation.undone(y[c]) - shift[c]);
                }
            }
            for (std::int64_t c = 0; c < width; ++c) {
                sum[begin + c] += part[c];
                centred[begin + c] += part_centred[c];
            }
        }
    }
}

template <typename Activation, bool kFrozen>
SHOAL_INLINE void row_result(const Call& call, std::int64_t first, std::int64_t last) {
    const Activation activation(call.slope);
    const std::int64_t channels = call.channels;
    const float *shift = call.shift, *mean_grad = call.mean, *mean_grad_xhat = call.mean_grad_xhat;
    const float* gamma_invstd = call.scale;
    for (std::int64_t row = first; row < last; ++row) {
        const float* y = call.y + row * channels;
        const float* grad = call.grad + row * channels;
        float* result = call.result + row * channels;
        SHOAL_EACH_BY_ITSELF
        for (std::int64_t c = 0; c < channels; ++c) {
            float dz = activation.gradient(y[c], grad[c]);
            if (!kFrozen) dz = dz - mean_grad[c] - (activation.undone(y[c]) - shift[c]) * mean_grad_xhat[c];
            result[c] = dz * gamma_invstd[c];
        }
    }
}

// One channel of images in NCHW order.
template <typename Activation>
SHOAL_INLINE void plane_forward(const Call& call, std::int64_t channel) {
    const Activation activation(call.slope);
    const float mean = call.mean[channel], shift = call.shift[channel], scale = call.scale[channel];
    for (std::int64_t image = 0; image < call.images; ++image) {
        const std::int64_t start = (image * call.channels + channel) * call.pixels;
        const float* x = call.y + start;
        float* result = call.result + start;
        SHOAL_EACH_BY_ITSELF
        for (std::int64_t pixel = 0; pixel < call.pixels; ++pixel)
            result[pixel] = activation.of((x[pixel] - mean) * scale + shift);
    }
}

template <typename Activation>
SHOAL_INLINE void plane_sums(const Call& call, std::int64_t channel) {
    const Activation activation(call.slope);
    const float shift = call.shift[channel];
    double sum = 0, centred = 0;
    for (std::int64_t image = 0; image < call.images; ++image) {
        const std::int64_t start = (image * call.channels + channel) * call.pixels;
        const float *y = call.y + start, *grad = call.grad + start;
        for (std::int64_t block = 0; block < call.pixels; block += kBlock) {
            const std::int64_t end = std::min(call.pixels, block + kBlock);
            float part = 0, part_centred = 0;
#pragma omp simd reduction(+ : part, part_centred)
            for (std::int64_t pixel = block; pixel < end; ++pixel) {
                const float dz = activation.gradient(y[pixel], grad[pixel]);
                part += dz;
                part_centred += dz * (activation.undone(y[pixel]) - shift);
            }
            sum += part;
            centred += part_centred;
        }
    }
    call.sum[channel] = sum;
    call.centred[channel] = centred;
}

template <typename Activation, bool kFrozen>
SHOAL_INLINE void plane_result(const Call& call, std::int64_t channel) {
    const Activation activation(call.slope);
    const float shift = call.shift[channel], gamma_invstd = call.scale[channel];
    const float mean_grad = kFrozen ? 0 : call.mean[channel];
    const float mean_grad_xhat = kFrozen ? 0 : call.mean_grad_xhat[channel];
    for (std::int64_t image = 0; image < call.images; ++image) {
        const std::int64_t start = (image * call.channels + channel) * call.pixels;
        const float *y = call.y + start, *grad = call.grad + start;
        float* result = call.result + start;
        SHOAL_EACH_BY_ITSELF
        for (std::int64_t pixel = 0; pixel < call.pixels; ++pixel) {
            float dz = activation.gradient(y[pixel], grad[pixel]);
            if (!kFrozen) dz = dz - mean_grad - (activation.undone(y[pixel]) - shift) * mean_grad_xhat;
            result[pixel] = dz * gamma_invstd;
        }
    }
}

using OfRows = void (*)(const Call&, std::int64_t first, std::int64_t last);
using OfPlane = void (*)(const Call&, std::int64_t channel);

struct Kernels {
    OfRows row_forward;
    OfPlane plane_forward;
    void (*row_sums)(const Call&, std::int64_t, std::int64_t, double*, double*);
    OfPlane plane_sums;
    OfRows row_result[2];  // the second with frozen statistics
    OfPlane plane_result[2];
};

// The bodies above, built for one instruction set and one activation.
#define SHOAL_KERNELS(Level, target)                                                                              \
    template <typename A>                                                                                         \
    struct Level {                                                                                                \
        target static void rows(const Call& call, std::int64_t first, std::int64_t last) {                        \
            row_forward<A>(call, first, last);                                                                    \
        }                                                                                                         \
        target static void plane(const Call& call, std::int64_t channel) { plane_forward<A>(call, channel); }     \
        target static void sums_of_rows(const Call& call, std::int64_t first, std::int64_t last, double* sum,     \
                                        double* centred) {                                                        \
            row_sums<A>(call, first, last, sum, centred);                                                         \
        }                                                                                                         \
        target static void sums_of_plane(const Call& call, std::int64_t channel) { plane_sums<A>(call, channel); } \
        template <bool kFrozen>                                                                                   \
        target static void result_of_rows(const Call& call, std::int64_t first, std::int64_t last) {              \
            row_result<A, kFrozen>(call, first, last);                                                            \
        }                                                                                                         \
        template <bool kFrozen>                                                                                   \
        target static void result_of_plane(const Call& call, std::int64_t channel) {                              \
            plane_result<A, kFrozen>(call, channel);                                                              \
        }                                                                                                         \
        static constexpr Kernels kernels = {rows,                                                                 \
                                            plane,                                                                \
                                            sums_of_rows,                                                         \
                                            sums_of_plane,                                                        \
                                            {result_of_rows<false>, result_of_rows<true>},                        \
                                            {result_of_plane<false>, result_of_plane<true>}};                     \
    };

SHOAL_KERNELS(Portable, )
#if defined(__x86_64__)
SHOAL_KERNELS(Avx2, __attribute__((target("avx2,fma"))))
SHOAL_KERNELS(Avx512, __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl"))))
#endif

template <typename Activation>
const Kernels& best_within(std::int32_t level) {
#if defined(__x86_64__)
    const std::uint64_t has = shoal_cpu_features();
    const std::uint64_t for_avx2 = SHOAL_AVX2 | SHOAL_FMA;
    const std::uint64_t for_avx512 = for_avx2 | SHOAL_AVX512F | SHOAL_AVX512BW | SHOAL_AVX512VL;
    if (level != 0 && level != 1 && (has & for_avx512) == for_avx512) return Avx512<Activation>::kernels;
    if (level != 0 && (has & for_avx2) == for_avx2) return Avx2<Activation>::kernels;
#endif
    (void)level;
    return Portable<Activation>::kernels;
}

const Kernels& kernels(const Call& call) {
    return call.activation == SHOAL_ELU ? best_within<Elu>(call.level) : best_within<LeakyRelu>(call.level);
}

// Every element once: threads share out pixels in NHWC order, channels in NCHW order.
void sweep(const Call& call, OfRows rows_of, OfPlane plane_of) {
    if (!call.channels_last) {
#pragma omp parallel for num_threads(call.threads) schedule(static)
        for (std::int64_t channel = 0; channel < call.channels; ++channel) plane_of(call, channel);
        return;
    }
    const std::int64_t rows = call.images * call.pixels, parts = call.threads;
#pragma omp parallel for num_threads(call.threads) schedule(static, 1)
    for (std::int64_t part = 0; part < parts; ++part)
        rows_of(call, rows * part / parts, rows * (part + 1) / parts);
}

}  // namespace

SHOAL_API void shoal_inverted_batch_norm_sums(const ShoalInvertedBatchNorm* whole) {
    const Call& call = *whole;
    const Kernels& run = kernels(call);
    if (!call.channels_last) {
#pragma omp parallel for num_threads(call.threads) schedule(static)
        for (std::int64_t channel = 0; channel < call.channels; ++channel) run.plane_sums(call, channel);
        return;
    }
    const std::int64_t rows = call.images * call.pixels, parts = call.threads;
    std::fill(call.workspace, call.workspace + 2 * parts * call.channels, 0.0);
#pragma omp parallel for num_threads(call.threads) schedule(static, 1)
    for (std::int64_t part = 0; part < parts; ++part) {
        double* sum = call.workspace + 2 * part * call.channels;
        run.row_sums(call, rows * part / parts, rows * (part + 1) / parts, sum, sum + call.channels);
    }
    for (std::int64_t c = 0; c < call.channels; ++c) {
        double sum = 0, centred = 0;
        for (std::int64_t part = 0; part < parts; ++part) {
            sum += call.workspace[2 * part * call.channels + c];
            centred += call.workspace[(2 * part + 1) * call.channels + c];
        }
        call.sum[c] = sum;
        call.centred[c] = centred;
    }
}

SHOAL_API void shoal_inverted_batch_norm_result(const ShoalInvertedBatchNorm* call) {
    const Kernels& run = kernels(*call);
    sweep(*call, run.row_result[call->frozen != 0], run.plane_result[call->frozen != 0]);
}

SHOAL_API void shoal_inverted_batch_norm_forward(const ShoalInvertedBatchNorm* call) {
    const Kernels& run = kernels(*call);
    sweep(*call, run.row_forward, run.plane_forward);
}
