// Batch norm and LeakyReLU as one sweep, and their backward from the pair's result y: z = y / slope below zero and y
// elsewhere, dz likewise from the gradient. Two sweeps over y and the gradient, the sums first, then the result, which may
// lie over the gradient.
//
// Sums run in floats over a block of pixels and in doubles from block to block.
#include <algorithm>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "shoal_native.h"

#if defined(__clang__)
#define SHOAL_EACH_BY_ITSELF _Pragma("clang loop vectorize(assume_safety)")
#else
#define SHOAL_EACH_BY_ITSELF _Pragma("GCC ivdep")
#endif
#define SHOAL_INLINE inline __attribute__((always_inline))

namespace {

constexpr std::int64_t kBlock = 512;  // pixels summed in floats
constexpr std::int64_t kMostChannels = 512;  // summed at once: two floats each stay in the first cache

using Call = ShoalInvertedBatchNorm;

// Pixels in NHWC order from `first` to `last`.
SHOAL_INLINE void row_sums(const Call& call, std::int64_t first, std::int64_t last, double* sum, double* centred) {
    const std::int64_t channels = call.channels;
    const float slope = call.slope, inverse_slope = 1.0f / slope;
    float part[kMostChannels], part_centred[kMostChannels];
    for (std::int64_t begin = 0; begin < channels; begin += kMostChannels) {
        const std::int64_t width = std::min(kMostChannels, channels - begin);
        const float* shift = call.shift + begin;
        for (std::int64_t block = first; block < last; block += kBlock) {
            std::fill(part, part + width, 0.0f);
            std::fill(part_centred, part_centred + width, 0.0f);
            for (std::int64_t row = block; row < std::min(last, block + kBlock); ++row) {
                const float* y = call.y + row * channels + begin;
                const float* grad = call.grad + row * channels + begin;
                SHOAL_EACH_BY_ITSELF
                for (std::int64_t c = 0; c < width; ++c) {
                    const bool positive = y[c] > 0;
                    const float dz = positive ? grad[c] : grad[c] * slope;
                    const float z = positive ? y[c] : y[c] * inverse_slope;
                    part[c] += dz;
                    part_centred[c] += dz * (z - shift[c]);
                }
            }
            for (std::int64_t c = 0; c < width; ++c) {
                sum[begin + c] += part[c];
                centred[begin + c] += part_centred[c];
            }
        }
    }
}

SHOAL_INLINE void row_result(const Call& call, std::int64_t first, std::int64_t last) {
    const std::int64_t channels = call.channels;
    const float slope = call.slope, inverse_slope = 1.0f / slope;
    const float *shift = call.shift, *slide = call.slide, *tilt = call.tilt, *steep = call.steep;
    for (std::int64_t row = first; row < last; ++row) {
        const float* y = call.y + row * channels;
        const float* grad = call.grad + row * channels;
        float* result = call.result + row * channels;
        SHOAL_EACH_BY_ITSELF
        for (std::int64_t c = 0; c < channels; ++c) {
            const bool positive = y[c] > 0;
            const float dz = positive ? grad[c] : grad[c] * slope;
            const float z = positive ? y[c] : y[c] * inverse_slope;
            result[c] = (dz - slide[c] - (z - shift[c]) * tilt[c]) * steep[c];
        }
    }
}

SHOAL_INLINE void row_forward(const Call& call, std::int64_t first, std::int64_t last) {
    const std::int64_t channels = call.channels;
    const float slope = call.slope;
    const float *mean = call.slide, *shift = call.shift, *steep = call.steep;
    for (std::int64_t row = first; row < last; ++row) {
        const float* x = call.y + row * channels;
        float* result = call.result + row * channels;
        SHOAL_EACH_BY_ITSELF
        for (std::int64_t c = 0; c < channels; ++c) {
            const float z = (x[c] - mean[c]) * steep[c] + shift[c];
            result[c] = z > 0 ? z : z * slope;
        }
    }
}

SHOAL_INLINE void plane_forward(const Call& call, std::int64_t channel) {
    const float slope = call.slope, shift = call.shift[channel], steep = call.steep[channel];
    const float mean = call.slide[channel];
    for (std::int64_t image = 0; image < call.images; ++image) {
        const std::int64_t start = (image * call.channels + channel) * call.pixels;
        const float* x = call.y + start;
        float* result = call.result + start;
        SHOAL_EACH_BY_ITSELF
        for (std::int64_t pixel = 0; pixel < call.pixels; ++pixel) {
            const float z = (x[pixel] - mean) * steep + shift;
            result[pixel] = z > 0 ? z : z * slope;
        }
    }
}

// One channel of images in NCHW order.
SHOAL_INLINE void plane_sums(const Call& call, std::int64_t channel) {
    const float slope = call.slope, inverse_slope = 1.0f / slope, shift = call.shift[channel];
    double sum = 0, centred = 0;
    for (std::int64_t image = 0; image < call.images; ++image) {
        const std::int64_t start = (image * call.channels + channel) * call.pixels;
        const float *y = call.y + start, *grad = call.grad + start;
        for (std::int64_t block = 0; block < call.pixels; block += kBlock) {
            const std::int64_t end = std::min(call.pixels, block + kBlock);
            float part = 0, part_centred = 0;
#pragma omp simd reduction(+ : part, part_centred)
            for (std::int64_t pixel = block; pixel < end; ++pixel) {
                const bool positive = y[pixel] > 0;
                const float dz = positive ? grad[pixel] : grad[pixel] * slope;
                const float z = positive ? y[pixel] : y[pixel] * inverse_slope;
                part += dz;
                part_centred += dz * (z - shift);
            }
            sum += part;
            centred += part_centred;
        }
    }
    call.sum[channel] = sum;
    call.centred[channel] = centred;
}

SHOAL_INLINE void plane_result(const Call& call, std::int64_t channel) {
    const float slope = call.slope, inverse_slope = 1.0f / slope, shift = call.shift[channel];
    const float slide = call.slide[channel], tilt = call.tilt[channel], steep = call.steep[channel];
    for (std::int64_t image = 0; image < call.images; ++image) {
        const std::int64_t start = (image * call.channels + channel) * call.pixels;
        const float *y = call.y + start, *grad = call.grad + start;
        float* result = call.result + start;
        SHOAL_EACH_BY_ITSELF
        for (std::int64_t pixel = 0; pixel < call.pixels; ++pixel) {
            const bool positive = y[pixel] > 0;
            const float dz = positive ? grad[pixel] : grad[pixel] * slope;
            const float z = positive ? y[pixel] : y[pixel] * inverse_slope;
            result[pixel] = (dz - slide - (z - shift) * tilt) * steep;
        }
    }
}

// The bodies above, built for one instruction set each.
struct Kernels {
    void (*row_forward)(const Call&, std::int64_t, std::int64_t);
    void (*plane_forward)(const Call&, std::int64_t);
    void (*row_sums)(const Call&, std::int64_t, std::int64_t, double*, double*);
    void (*row_result)(const Call&, std::int64_t, std::int64_t);
    void (*plane_sums)(const Call&, std::int64_t);
    void (*plane_result)(const Call&, std::int64_t);
};

#define SHOAL_KERNELS(name, target)                                                              \
    target void name##_row_forward(const Call& call, std::int64_t first, std::int64_t last) {    \
        row_forward(call, first, last);                                                          \
    }                                                                                            \
    target void name##_plane_forward(const Call& call, std::int64_t channel) {                   \
        plane_forward(call, channel);                                                            \
    }                                                                                            \
    target void name##_row_sums(const Call& call, std::int64_t first, std::int64_t last,         \
                                double* sum, double* centred) {                                  \
        row_sums(call, first, last, sum, centred);                                               \
    }                                                                                            \
    target void name##_row_result(const Call& call, std::int64_t first, std::int64_t last) {     \
        row_result(call, first, last);                                                           \
    }                                                                                            \
    target void name##_plane_sums(const Call& call, std::int64_t channel) {                      \
        plane_sums(call, channel);                                                               \
    }                                                                                            \
    target void name##_plane_result(const Call& call, std::int64_t channel) {                    \
        plane_result(call, channel);                                                             \
    }                                                                                            \
    constexpr Kernels name = {name##_row_forward, name##_plane_forward, name##_row_sums,         \
                              name##_row_result,  name##_plane_sums,    name##_plane_result};

SHOAL_KERNELS(portable, )
#if defined(__x86_64__)
SHOAL_KERNELS(avx2, __attribute__((target("avx2,fma"))))
SHOAL_KERNELS(avx512, __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl"))))
#endif

const Kernels& kernels(std::int32_t level) {
#if defined(__x86_64__)
    const std::uint64_t has = shoal_cpu_features();
    const std::uint64_t for_avx2 = SHOAL_AVX2 | SHOAL_FMA;
    const std::uint64_t for_avx512 = for_avx2 | SHOAL_AVX512F | SHOAL_AVX512BW | SHOAL_AVX512VL;
    if (level != 0 && level != 1 && (has & for_avx512) == for_avx512) return avx512;
    if (level != 0 && (has & for_avx2) == for_avx2) return avx2;
#endif
    (void)level;
    return portable;
}

// Every element once: threads share out pixels in NHWC order, channels in NCHW order.
void sweep(const Call& call, void (*rows_of)(const Call&, std::int64_t, std::int64_t),
           void (*plane_of)(const Call&, std::int64_t)) {
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
    const Kernels& run = kernels(call.level);
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
    const Kernels& run = kernels(call->level);
    sweep(*call, run.row_result, run.plane_result);
}

SHOAL_API void shoal_inverted_batch_norm_forward(const ShoalInvertedBatchNorm* call) {
    const Kernels& run = kernels(call->level);
    sweep(*call, run.row_forward, run.plane_forward);
}
