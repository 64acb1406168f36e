// One block of a weight's gradient: a few channels in and out stay in L2 while all pixels go by.
#pragma once

#include "norm_strip.h"

namespace shoal {
namespace {

// Rows and columns of one image's result that are worked on at a time.
struct Patch {
    std::int64_t image, row, column;
    int rows, columns;
};

// sums[R][kColumns] += sum over the patch of grads[pixel][row] * inputs[pixel][column]
template <int R>
void block_tile(const float* grads, std::ptrdiff_t grad_stride, const float* inputs, std::ptrdiff_t input_step,
                std::ptrdiff_t input_row, int rows, int columns, float* sums) {
    Vector tile[R][kTileVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < kTileVectors; ++c) tile[r][c] = load(sums + r * kColumns + c * kLanes);
    for (int row = 0; row < rows; ++row, inputs += input_row) {
        const float* input = inputs;
        for (int column = 0; column < columns; ++column, grads += grad_stride, input += input_step) {
            Vector across[kTileVectors];
#pragma GCC unroll 16
            for (int c = 0; c < kTileVectors; ++c) across[c] = load(input + c * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
                for (int c = 0; c < kTileVectors; ++c) tile[r][c] += grads[r] * across[c];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < kTileVectors; ++c) store(sums + r * kColumns + c * kLanes, tile[r][c]);
}

template <typename Rows>
struct BlockTiles;

template <int... Less>
struct BlockTiles<std::integer_sequence<int, Less...>> {
    static constexpr decltype(&block_tile<1>) of[] = {&block_tile<Less + 1>...};
};

using AllBlockTiles = BlockTiles<std::make_integer_sequence<int, kTileRows>>;

inline void ask_for(const float* at, int channels) {
    for (int c = 0; c < channels; c += 16) __builtin_prefetch(at + c, 0, 2);
}

// What the taps of a patch read, normalised; of a 1 x 1 only the pixels that it reads. Zero outside the image.
inline void fill_inputs(const GradBlock& block, const Patch& patch) {
    const ShoalNormWeightGrad& call = *block.call;
    const int halo = call.kernel / 2, step = call.kernel == 1 ? call.stride : 1, from = block.in_first;
    const int whole = block.ins / kLanes * kLanes, rest = block.ins - whole;
    const float *mean = call.mean + from, *scale = call.scale + from, *shift = call.shift + from;
    const std::int64_t next = patch.rows * call.stride * call.width * call.ld_x;
    float* to = block.inputs;
    for (int r = 0; r < block.panel_rows(patch.rows); ++r) {
        const std::int64_t row = patch.row * call.stride - halo + std::int64_t{r} * step;
        for (int c = 0; c < block.panel_columns(patch.columns); ++c, to += block.input_stride) {
            const std::int64_t column = patch.column * call.stride - halo + std::int64_t{c} * step;
            if (row < 0 || row >= call.height || column < 0 || column >= call.width) {
                std::memset(to, 0, block.input_stride * sizeof(float));
                continue;
            }
            const float* x = call.x + ((patch.image * call.height + row) * call.width + column) * call.ld_x + from;
            ask_for(x + next, block.ins);
            activate_pixel(x, mean, scale, shift, call.relu, whole, rest, to);
        }
    }
}

inline void fill_grads(const GradBlock& block, const Patch& patch) {
    const ShoalNormWeightGrad& call = *block.call;
    const std::int64_t next = patch.rows * call.out_width * call.ld_grad_y;
    float* to = block.grads;
    for (int r = 0; r < patch.rows; ++r) {
        const std::int64_t first = (patch.image * call.out_height + patch.row + r) * call.out_width + patch.column;
        const float* grad = call.grad_y + first * call.ld_grad_y + block.out_first;
        for (int c = 0; c < patch.columns; ++c, grad += call.ld_grad_y, to += block.grad_stride) {
            ask_for(grad + next, block.outs);
            std::memcpy(to, grad, block.outs * sizeof(float));
        }
    }
}

inline void add_patch(const GradBlock& block, const Patch& patch) {
    const ShoalNormWeightGrad& call = *block.call;
    const int taps = call.kernel * call.kernel, in_tiles = (block.ins + kColumns - 1) / kColumns;
    const std::ptrdiff_t step = call.kernel == 1 ? 1 : call.stride, pixel_stride = block.input_stride;
    const std::ptrdiff_t panel_row = block.panel_columns(patch.columns) * pixel_stride;
    for (int tile = 0; tile < in_tiles; ++tile)
        for (int tap = 0; tap < taps; ++tap) {
            const float* inputs = block.inputs + tap / call.kernel * panel_row + tap % call.kernel * pixel_stride + tile * kColumns;
            float* sums = block.sums + std::ptrdiff_t{tap * in_tiles + tile} * block.outs * kColumns;
            each_tile(block.outs, [&](int first, int rows) {
                AllBlockTiles::of[rows - 1](block.grads + first, block.grad_stride, inputs, step * pixel_stride, step * panel_row,
                                            patch.rows, patch.columns, sums + std::ptrdiff_t{first} * kColumns);
            });
        }
}

void weight_grad_block(const GradBlock& block) {
    const ShoalNormWeightGrad& call = *block.call;
    const int taps = call.kernel * call.kernel, in_tiles = (block.ins + kColumns - 1) / kColumns;
    std::memset(block.sums, 0, std::size_t(taps) * in_tiles * kColumns * block.outs * sizeof(float));
    for (std::int64_t image = 0; image < call.images; ++image)
        for (std::int64_t row = 0; row < call.out_height; row += block.rows)
            for (std::int64_t column = 0; column < call.out_width; column += block.columns) {
                const Patch patch = {image, row, column, int(least(block.rows, call.out_height - row)),
                                     int(least(block.columns, call.out_width - column))};
                fill_inputs(block, patch);
                fill_grads(block, patch);
                add_patch(block, patch);
            }
    for (int out = 0; out < block.outs; ++out)
        for (int tap = 0; tap < taps; ++tap) {
            float* to = call.grad_weight + (std::int64_t{block.out_first + out} * taps + tap) * call.in_channels;
            for (int tile = 0; tile < in_tiles; ++tile)
                std::memcpy(to + block.in_first + tile * kColumns,
                            block.sums + (std::ptrdiff_t{tap * in_tiles + tile} * block.outs + out) * kColumns,
                            least(kColumns, block.ins - tile * kColumns) * sizeof(float));
        }
}

}  // namespace
}  // namespace shoal
