// The passes over NHWC rows, at the speed of memory: each reads and writes every element once.
#pragma once

#include "norm_weight_grad.h"
#include "norm_winograd.h"

namespace shoal {
namespace {

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

void activate_rows(const ShoalNormPass& call, Rows rows) {
    for (std::int64_t row = rows.first; row < rows.last; ++row) {
        const float* x = call.x + row * call.ld_x;
        const float* residual = call.residual ? call.residual + row * call.ld_residual : nullptr;
        float* out = call.out + row * call.ld_out;
        each_vector(call.channels, [=, &call](std::int64_t c, auto there) {
            Vector value = activate(there.get(x + c), there.get(call.mean + c), there.get(call.scale + c),
                                    there.get(call.shift + c), !residual && call.relu);
            if (residual) {
                value += there.get(residual + c);
                if (call.relu) value = relu_of(value);
            }
            there.put(out + c, value);
        });
    }
}

void activate_backward_rows(const ShoalNormPass& call, Rows rows, Scratch& scratch) {
    float *sums = scratch.sum, *products = scratch.square;
    clear_sums(call.channels, sums, products);
    for (std::int64_t first = rows.first; first < rows.last; first += kGradientsInFloats) {
        for (std::int64_t row = first; row < least(rows.last, first + kGradientsInFloats); ++row) {
            const float *x = call.x + row * call.ld_x, *grad = call.grad + row * call.ld_grad;
            const float* out = call.out ? call.out + row * call.ld_out : nullptr;
            float* grad_x = call.grad_x ? call.grad_x + row * call.ld_grad_x : nullptr;
            float* grad_residual = call.grad_residual ? call.grad_residual + row * call.ld_grad_residual : nullptr;
            each_vector(call.channels, [=, &call](std::int64_t c, auto there) {
                const Vector off = there.get(x + c) - there.get(call.mean + c), factor = there.get(call.scale + c);
                Vector da = there.get(grad + c);
                if (call.relu) {
                    const Vector kept = out ? there.get(out + c) : off * factor + there.get(call.shift + c);
                    da = kept <= Vector{} ? Vector{} : da;
                }
                store(sums + c, load(sums + c) + da);
                store(products + c, load(products + c) + da * off);
                if (grad_residual) there.put(grad_residual + c, da);
                if (grad_x) there.put(grad_x + c, da * factor);
            });
        }
        move_sums(call.channels, sums, products, scratch.total, scratch.centred);
    }
}

constexpr Level kLevel = {kTileRows,
                          kColumns,
                          kDepth,
                          kPixelStride,
                          &forward_strip,
                          &backward_strip,
                          &statistics_rows,
                          &activate_rows,
                          &activate_backward_rows,
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
