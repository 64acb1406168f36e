// The passes of a norm, at the speed of memory: each reads and writes every element once.
#pragma once

#include "norm_activations.h"
#include "norm_weight_grad.h"
#include "norm_winograd.h"

namespace shoal {
namespace {

#define SHOAL_INLINE inline __attribute__((always_inline))

constexpr int kRowsOfSums = 256;  // of deviations, in floats before they are added to the doubles

template <int R>
inline void add_rows(const float* x, std::int64_t ld, std::int64_t channels, const float* pivot, float* sums,
                     float* squares) {
    each_vector(channels, [=](std::int64_t c, auto there) {
        const Vector around = there.get(pivot + c);
        Vector sum = {}, square = {};
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            __builtin_prefetch(x + (r + R) * ld + c);
            const Vector off = there.get(x + r * ld + c) - around;
            sum += off;
            square += off * off;
        }
        store(sums + c, load(sums + c) + sum);
        store(squares + c, load(squares + c) + square);
    });
}

void statistics_rows(const ShoalNormPass& call, Rows rows, Scratch& scratch) {
    const std::int64_t ld = call.ld_x, padded = (call.channels + kLanes - 1) / kLanes * kLanes;
    for (std::int64_t first = rows.first; first < rows.last; first += kRowsOfSums) {
        const std::int64_t count = least(kRowsOfSums, rows.last - first);
        const float* x = call.x + first * ld;
        std::memset(scratch.sum, 0, padded * sizeof(float));
        std::memset(scratch.square, 0, padded * sizeof(float));
        std::int64_t r = 0;
        for (; r + 4 <= count; r += 4) add_rows<4>(x + r * ld, ld, call.channels, x, scratch.sum, scratch.square);
        for (; r < count; ++r) add_rows<1>(x + r * ld, ld, call.channels, x, scratch.sum, scratch.square);
        add_block(scratch.moments, call.channels, count, x, scratch.sum, scratch.square);
    }
}

// Of channels in NCHW order, each of which is one thread's.
void statistics_planes(const ShoalNormPass& call, Rows part) {
    constexpr std::int64_t kBlock = kRowsOfSums * kLanes;
    for (std::int64_t channel = part.first; channel < part.last; ++channel) {
        double middle = 0, squares = 0;
        Moments moments{0, &middle, &squares};
        for (std::int64_t image = 0; image < call.images; ++image)
            for (std::int64_t first = 0; first < call.pixels; first += kBlock) {
                const std::int64_t count = least(kBlock, call.pixels - first);
                const float* x = call.x + image * call.ld_x + channel * call.pixels + first;
                Vector sum{}, square{};
                std::int64_t i = 0;
                for (; i + kLanes <= count; i += kLanes) {
                    const Vector off = load(x + i) - x[0];
                    sum += off;
                    square += off * off;
                }
                float total = 0, total_square = 0;
                for (; i < count; ++i) {
                    total += x[i] - x[0];
                    total_square += (x[i] - x[0]) * (x[i] - x[0]);
                }
                for (int lane = 0; lane < kLanes; ++lane) {
                    total += sum[lane];
                    total_square += square[lane];
                }
                add_block(moments, 1, count, x, &total, &total_square);
            }
        finish(&moments, 1, 1, call.statistic_mean + channel, call.statistic_variance + channel);
    }
}

// Values that lie side by side: the channels of a pixel in NHWC order, or the pixels of a channel in NCHW order.
struct Run {
    std::int64_t outer, channel, offset, count;

    template <typename Float>
    Float* of(Float* tensor, std::int64_t ld) const {
        return tensor ? tensor + outer * ld + offset : nullptr;
    }
};

template <bool kPlane, typename Body>
SHOAL_INLINE void each_run(const ShoalNormPass& call, Rows part, const Body& body) {
    if (kPlane)
        for (std::int64_t channel = part.first; channel < part.last; ++channel)
            for (std::int64_t image = 0; image < call.images; ++image)
                body(Run{image, channel, channel * call.pixels, call.pixels});
    else
        for (std::int64_t row = part.first; row < part.last; ++row) body(Run{row, 0, 0, call.channels});
}

// How single values are read and written.
struct One {
    float get(const float* from) const { return *from; }
    void put(float* to, float value) const { *to = value; }
};

// at(place, how to read and write there) for each vector of values and for those that fill none: planes are often small.
template <typename At>
SHOAL_INLINE void each_value(std::int64_t count, const At& at) {
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) at(i, Whole{});
    for (; i < count; ++i) at(i, One{});
}

// A vector of the channels, as the values of a run meet it: a pixel's have one each, a plane's all the same.
template <bool kPlane>
struct OfChannels {
    const float* at;

    OfChannels(const float* vector, const Run&) : at(vector) {}
    template <typename There>
    auto get(std::int64_t c, There there) const {
        return there.get(at + c);
    }
};

template <>
struct OfChannels<true> {
    float single;
    Vector vector;

    OfChannels(const float* vector, const Run& run) : single(vector ? vector[run.channel] : 0), vector(Vector{} + single) {}
    Vector get(std::int64_t, Whole) const { return vector; }
    float get(std::int64_t, One) const { return single; }
};

template <typename Activation, bool kPlane>
void apply_part(const ShoalNormPass& call, Rows part) {
    const Activation activation(call.alpha);
    each_run<kPlane>(call, part, [&](const Run& run) {
        const OfChannels<kPlane> mean(call.mean, run), scale(call.scale, run), shift(call.shift, run);
        const float *x = run.of(call.x, call.ld_x), *residual = run.of(call.residual, call.ld_residual);
        float* out = run.of(call.out, call.ld_out);
        each_value(run.count, [&](std::int64_t c, auto there) {
            auto value = (there.get(x + c) - mean.get(c, there)) * scale.get(c, there) + shift.get(c, there);
            if (residual) value += there.get(residual + c);
            there.put(out + c, activation.of(value));
        });
    });
}

// What the backward pass reads of a run: x - mean, times the scale where it is inverted, and the gradient before the
// activation.
template <typename Activation, bool kInverted, bool kPlane>
struct Before {
    const Activation activation;
    const OfChannels<kPlane> mean, scale, shift;
    const float *x, *grad, *z;

    Before(const ShoalNormPass& call, const Run& run)
        : activation(call.alpha), mean(call.mean, run), scale(call.scale, run), shift(call.shift, run),
          x(run.of(call.x, call.ld_x)), grad(run.of(call.grad, call.ld_grad)), z(run.of<const float>(call.out, call.ld_out)) {}

    template <typename There, typename V>
    SHOAL_INLINE void read(std::int64_t c, There there, V& off, V& da) const {
        da = there.get(grad + c);
        if constexpr (kInverted) {
            const V y = there.get(x + c);
            off = activation.undone(y) - shift.get(c, there);
            da = activation.gradient_of_result(y, da);
        } else {
            off = there.get(x + c) - mean.get(c, there);
            if constexpr (Activation::kReadsInput)
                da = activation.gradient(z ? there.get(z + c) : off * scale.get(c, there) + shift.get(c, there), da);
        }
    }
};

// Of a block of a plane.
struct PlaneSums {
    Vector sums{}, products{};
    float sum = 0, product = 0;

    void add(Vector da, Vector times_off) {
        sums += da;
        products += times_off;
    }
    void add(float da, float times_off) {
        sum += da;
        product += times_off;
    }
    void move(double& total, double& centred) const {
        double of_lanes = sum, products_of_lanes = product;
        for (int lane = 0; lane < kLanes; ++lane) {
            of_lanes += sums[lane];
            products_of_lanes += products[lane];
        }
        total += of_lanes;
        centred += products_of_lanes;
    }
};

template <typename Activation, bool kInverted, bool kPlane>
void reduce_part(const ShoalNormPass& call, Rows part, Scratch& scratch) {
    float *sums = scratch.sum, *products = scratch.square;
    std::int64_t in_floats = 0;
    if (!kPlane) clear_sums(call.channels, sums, products);
    each_run<kPlane>(call, part, [&](const Run& run) {
        const Before<Activation, kInverted, kPlane> before(call, run);
        float *grad_x = run.of(call.grad_x, call.ld_grad_x), *masked = run.of(call.grad_residual, call.ld_grad_residual);
        const auto at = [&](std::int64_t c, auto there, auto add) {
            auto off = there.get(before.x + c), da = off;
            before.read(c, there, off, da);
            add(da, da * off);
            if (masked) there.put(masked + c, da);
            if (grad_x) there.put(grad_x + c, da * before.scale.get(c, there));
        };
        if (!kPlane) {
            each_value(run.count, [&](std::int64_t c, auto there) {
                at(c, there, [&](auto da, auto product) {
                    there.put(sums + c, there.get(sums + c) + da);
                    there.put(products + c, there.get(products + c) + product);
                });
            });
            if (++in_floats % kGradientsInFloats == 0)
                move_sums(call.channels, sums, products, scratch.total, scratch.centred);
            return;
        }
        constexpr std::int64_t kBlock = kGradientsInFloats * kLanes;
        double &total = scratch.total[run.channel], &centred = scratch.centred[run.channel];
        for (std::int64_t first = 0; first < run.count; first += kBlock) {
            PlaneSums block;
            each_value(least(kBlock, run.count - first),
                       [&](std::int64_t c, auto there) { at(first + c, there, [&](auto da, auto product) { block.add(da, product); }); });
            block.move(total, centred);
        }
    });
    if (!kPlane) move_sums(call.channels, sums, products, scratch.total, scratch.centred);
}

template <typename Activation, bool kInverted, bool kPlane>
void apply_backward_part(const ShoalNormPass& call, Rows part) {
    each_run<kPlane>(call, part, [&](const Run& run) {
        const Before<Activation, kInverted, kPlane> before(call, run);
        const OfChannels<kPlane> slope(call.slope, run), constant(call.constant, run);
        const bool moves = call.slope;
        float* grad_x = run.of(call.grad_x, call.ld_grad_x);
        each_value(run.count, [&](std::int64_t c, auto there) {
            auto off = there.get(before.x + c), da = off;
            before.read(c, there, off, da);
            if (moves) da = da + constant.get(c, there) + off * slope.get(c, there);
            there.put(grad_x + c, da * before.scale.get(c, there));
        });
    });
}

template <typename Activation>
void apply(const ShoalNormPass& call, Rows part) {
    (call.channels_last ? &apply_part<Activation, false> : &apply_part<Activation, true>)(call, part);
}

template <typename Activation>
void reduce(const ShoalNormPass& call, Rows part, Scratch& scratch) {
    if constexpr (Activation::kHasInverse)
        if (call.inverted)
            return (call.channels_last ? &reduce_part<Activation, true, false> : &reduce_part<Activation, true, true>)(
                call, part, scratch);
    (call.channels_last ? &reduce_part<Activation, false, false> : &reduce_part<Activation, false, true>)(call, part, scratch);
}

template <typename Activation>
void apply_backward(const ShoalNormPass& call, Rows part) {
    if constexpr (Activation::kHasInverse)
        if (call.inverted)
            return (call.channels_last ? &apply_backward_part<Activation, true, false>
                                       : &apply_backward_part<Activation, true, true>)(call, part);
    (call.channels_last ? &apply_backward_part<Activation, false, false> : &apply_backward_part<Activation, false, true>)(call, part);
}

template <typename Activation>
constexpr NormPasses passes_of() {
    return {&apply<Activation>, &reduce<Activation>, &apply_backward<Activation>};
}

constexpr Level kLevel = {kTileRows,
                          kColumns,
                          kDepth,
                          kPixelStride,
                          &forward_strip,
                          &backward_strip,
                          &statistics_rows,
                          &statistics_planes,
                          {passes_of<Identity>(), passes_of<Relu>(), passes_of<LeakyRelu>(), passes_of<Elu>()},
                          &weight_grad_block,
                          kSquareStride,
                          kSquareDepth,
                          kChunk,
                          &winograd_forward_weight,
                          &winograd_backward_weight,
                          &winograd_transform,
                          &winograd_forward,
                          &winograd_backward,
                          &winograd_weight_grad};

}  // namespace
}  // namespace shoal
