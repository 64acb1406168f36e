// What the drivers of the fused convolutions and passes share with the code of each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shoal_native.h"

namespace shoal {

// Count, mean and sum of squared deviations of every channel, fed block by block (Chan, Golub, LeVeque 1979).
struct Moments {
    std::int64_t count;
    double *mean, *squares;
};

// One thread's part of the workspace. Pixels of panels are `pixel_stride` floats apart, whatever their channels.
struct Scratch {
    float *input, *grad, *grad_input, *weight_grad;
    float *panel, *spread, *product;  // of squares: four rows of pixels, spread gradients, products of a column tile
    float* weight;                    // of squares, transformed: column tile, point, depth, column
    float *pivot, *sum, *square;  // of one strip, before they are added to the doubles
    Moments moments;              // of y
    double *total, *centred;      // sum(da) and sum(da * (x - mean))
};

// Rows of pixels that are worked on while they are in the cache: `segments` rows of one image, or a run of pixels.
struct Strip {
    std::int64_t first;  // its first pixel's number
    int segments, width;
    bool above, below;  // whether the image goes on there
};

struct Convolution {
    const ShoalNormConv* call;
    int halo, taps;
    const float *forward_weight, *backward_weight;  // packed: depth block, column tile, tap, depth, column
    const float* bias;                              // filled up to a whole tile, or null
    const float *grad_constant, *grad_slope;        // g = grad_y + constant + slope * (y - mean_y)
};

constexpr std::int64_t kPoints = 16;  // of a square's transform

// A 3 x 3 convolution in squares of 2 x 2 results; the last of an image may reach beyond it.
struct Winograd {
    const ShoalNormConv* call;
    int square_rows, square_columns;  // of an image
    int most;                         // squares of a block: how far a block's points are apart
    const float* bias;                // filled up to a whole tile, or null
    const float *grad_constant, *grad_slope;
};

// Rows of squares that are worked on at a time, numbered through all images.
struct SquareRows {
    std::int64_t first;
    int count;
};

// Rows of a pass over an NHWC tensor, channels of one over an NCHW tensor, or column tiles, from first to last (excluded).
struct Rows {
    std::int64_t first, last;
};

// The passes of a norm with one activation.
struct NormPasses {
    void (*apply)(const ShoalNormPass&, Rows);
    void (*reduce)(const ShoalNormPass&, Rows, Scratch&);
    void (*apply_backward)(const ShoalNormPass&, Rows);
};

// Channels of a weight's gradient, and one thread's memory for them. Pixels of its panels are one pixel stride apart.
struct GradBlock {
    const ShoalNormWeightGrad* call;
    int out_first, outs, in_first, ins;
    int rows, columns;  // of the result that are worked on at a time
    int input_stride, grad_stride;
    float *sums, *inputs, *grads;

    int panel_rows(int of_result) const { return call->kernel == 1 ? of_result : (of_result - 1) * call->stride + call->kernel; }
    int panel_columns(int of_result) const { return panel_rows(of_result); }
};

struct Level {
    int rows, columns;  // of the register tile
    int depth, pixel_stride;   // of a panel
    // The strip to come, for which memory is asked meanwhile, has no segments after the last.
    void (*forward)(const Convolution&, const Strip& strip, const Strip& next, Scratch&);
    void (*backward)(const Convolution&, const Strip& strip, const Strip& next, Scratch&);
    void (*statistics)(const ShoalNormPass&, Rows, Scratch&);
    void (*statistics_planes)(const ShoalNormPass&, Rows);
    NormPasses passes[4];  // by ShoalActivation
    void (*weight_grad)(const GradBlock&);
    int square_stride, square_depth, chunk;  // of a block of squares, see norm_winograd.h
    void (*winograd_forward_weight)(const ShoalNormConv&, std::int64_t tile, float* to);
    void (*winograd_backward_weight)(const ShoalNormConv&, std::int64_t tile, float* to);
    void (*winograd_transform)(const Winograd&, const SquareRows& block, const SquareRows& part, bool backward, Scratch&);
    void (*winograd_forward)(const Winograd&, const SquareRows&, const SquareRows& next, Rows tiles, Scratch&);
    void (*winograd_backward)(const Winograd&, const SquareRows&, const SquareRows& next, Rows tiles, Scratch&);
    void (*winograd_weight_grad)(const ShoalNormConv&, const float* sums, std::ptrdiff_t next, int parts, std::int64_t tile);
};

// A 3 x 3 by Winograd's F(2x2, 3x3), and what it takes for itself of the workspace.
std::int64_t winograd_workspace_bytes(const ShoalNormConv&, const Level&, bool backward);
void winograd_forward(const ShoalNormConv&, const Level&);
void winograd_backward(const ShoalNormConv&, const Level&);

const Level& portable_level();
#if defined(__x86_64__)
const Level& avx2_level();
const Level& avx512_level();
#endif

// The kernels of a level, of the best this processor runs for a negative one; null where it runs no such level.
const Level* level_of(std::int32_t level);

void add_block(Moments&, std::int64_t channels, std::int64_t rows, const float* pivot, const float* sum,
               const float* square);
void finish(const Moments* parts, int count, std::int64_t channels, float* mean, float* variance);

}  // namespace shoal
