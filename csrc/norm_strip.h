// One strip of a fused convolution, forward and backward: normalised into a padded panel, then nothing but tiles.
#pragma once

#include "norm_ahead.h"

namespace shoal {
namespace {

inline Vector relu_of(Vector value) { return Vector{} > value ? Vector{} : value; }

inline Vector activate(Vector x, Vector mean, Vector scale, Vector shift, bool relu) {
    const Vector value = (x - mean) * scale + shift;
    return relu ? relu_of(value) : value;
}

// The panel's pixels in order, those outside the image zero: write(pixel's number, where, whether it is there)
template <typename Write>
inline void each_panel_pixel(const Strip& strip, int halo, int channels, float* panel, Write write) {
    const int filled = (channels + kColumns - 1) / kColumns * kColumns;
    for (int s = -halo; s < strip.segments + halo; ++s) {
        const bool row_there = (s >= 0 || strip.above) && (s < strip.segments || strip.below);
        for (int w = -halo; w < strip.width + halo; ++w, panel += kPixelStride) {
            const bool there = row_there && w >= 0 && w < strip.width;
            if (there)
                write(strip.first + std::int64_t{s} * strip.width + w, panel);
            else
                std::memset(panel, 0, filled * sizeof(float));
        }
    }
}

// Channels of one pixel, those in whole vectors and the rest; zeros to the end of the column tile.
inline void activate_pixel(const float* x, const float* mean, const float* scale, const float* shift, bool relu,
                           int whole, int rest, float* to) {
    int c = 0;
    for (; c < whole; c += kLanes)
        store(to + c, activate(load(x + c), load(mean + c), load(scale + c), load(shift + c), relu));
    if (rest) {
        store(to + c, activate(load_some(x + c, rest), load_some(mean + c, rest), load_some(scale + c, rest),
                               load_some(shift + c, rest), relu));
        c += kLanes;
    }
    for (; c % kColumns; c += kLanes) store(to + c, Vector{});
}

// Some channels of x as the convolution reads them, normalised; zeros to the end of the column tile.
struct InputPixels {
    const float *x, *mean, *scale, *shift;
    std::int64_t ld;
    int whole, rest;
    bool relu;

    InputPixels(const ShoalNormConv& call, int from, int count)
        : x(call.x + from), mean(call.mean + from), scale(call.scale + from), shift(call.shift + from), ld(call.ld_x),
          whole(count / kLanes * kLanes), rest(count - whole), relu(call.relu) {}

    void operator()(std::int64_t pixel, float* to) const {
        activate_pixel(x + pixel * ld, mean, scale, shift, relu, whole, rest, to);
    }
};

// Some channels of the whole gradient of y; zeros to the end of the vector.
struct GradPixels {
    const float *grad, *factor, *y, *mean, *constant, *slope;
    std::int64_t ld_grad, ld_y;
    int count;

    GradPixels(const ShoalNormConv& call, const float* grad_constant, const float* grad_slope, int from, int some)
        : grad(call.grad_y + from), factor(call.grad_factor ? call.grad_factor + from : nullptr),
          y(grad_constant ? call.y + from : nullptr),
          mean(grad_constant ? call.mean_y + from : nullptr), constant(grad_constant ? grad_constant + from : nullptr),
          slope(grad_constant ? grad_slope + from : nullptr), ld_grad(call.ld_grad_y), ld_y(call.ld_y), count(some) {}

    void operator()(std::int64_t pixel, float* to) const {
        const float *g = grad + pixel * ld_grad, *of = constant ? y + pixel * ld_y : nullptr;
        const int whole = count / kLanes * kLanes, rest = count - whole;
        const auto each = [=](int c, auto there) {
            Vector whole_grad = there.get(g + c);
            if (factor) whole_grad = rounded(whole_grad * there.get(factor + c));
            if (constant)
                whole_grad += rounded((there.get(of + c) - there.get(mean + c)) * there.get(slope + c)) + there.get(constant + c);
            store(to + c, whole_grad);
        };
        for (int c = 0; c < whole; c += kLanes) each(c, Whole{});
        if (rest) each(whole, Some{rest});
    }
};

// As many taps at a time as leave their weights in L1; between passes the sums wait in `out`.
inline int taps_a_pass(int taps, int depth) {
    if (taps == 1 || depth <= 32) return taps;
    return depth <= kDepth / 4 ? 3 : 1;
}

inline void tap_offsets(const Convolution& of, const Strip& strip, bool flipped, std::ptrdiff_t* offsets) {
    const int side = 2 * of.halo + 1;
    for (int tap = 0; tap < of.taps; ++tap) {
        const int at = flipped ? of.taps - 1 - tap : tap;
        offsets[tap] = (std::ptrdiff_t{at / side} * (strip.width + 2 * of.halo) + at % side) * kPixelStride;
    }
}

// How many tiles column_tile runs.
inline std::int64_t tiles_of_column(const Convolution& of, const Strip& strip, int depth) {
    const int at_once = taps_a_pass(of.taps, depth);
    return std::int64_t{of.taps / at_once} * strip.segments * ((strip.width + kTileRows - 1) / kTileRows);
}

// out[pixel][columns] = sum over taps and one depth block, for one column tile. The first pass starts from `start`.
inline void column_tile(const Convolution& of, const Strip& strip, const float* panel, const std::ptrdiff_t* offsets,
                        int depth, const float* weight, float* out, std::ptrdiff_t ld_out, int columns,
                        const float* start, bool go_on, TileSums* sums, Ahead& ahead) {
    const int at_once = taps_a_pass(of.taps, depth);
    const std::ptrdiff_t row_stride = std::ptrdiff_t{strip.width + 2 * of.halo} * kPixelStride;
    alignas(64) float edge[kTileRows * kColumns] = {};
    for (int tap = 0; tap < of.taps; tap += at_once) {
        const bool from_out = go_on || tap, last = tap + at_once >= of.taps;
        for (int s = 0; s < strip.segments; ++s) {
            each_tile(strip.width, [&](int first, int rows) {
                const float* from = panel + s * row_stride + std::ptrdiff_t{first} * kPixelStride;
                float* to = out + (std::ptrdiff_t{s} * strip.width + first) * ld_out;
                const float* tile_weight = weight + std::ptrdiff_t{tap} * depth * kColumns;
                TileSums* tile_sums = last ? sums : nullptr;
                ahead.step();
                if (columns == kColumns) {
                    AllTiles::rows[rows - 1](from, offsets + tap, at_once, depth, tile_weight, to, ld_out,
                                             from_out ? to : start, from_out ? ld_out : 0, tile_sums);
                } else {
                    for (int r = 0; from_out && r < rows; ++r)
                        std::memcpy(edge + r * kColumns, to + r * ld_out, columns * sizeof(float));
                    AllTiles::rows[rows - 1](from, offsets + tap, at_once, depth, tile_weight, edge, kColumns,
                                             from_out ? edge : start, from_out ? kColumns : 0, tile_sums);
                    for (int r = 0; r < rows; ++r)
                        std::memcpy(to + r * ld_out, edge + r * kColumns, columns * sizeof(float));
                }
                if (tile_sums) tile_sums->first = false;
            });
        }
    }
}

void forward_strip(const Convolution& of, const Strip& strip, const Strip& next, Scratch& scratch) {
    const ShoalNormConv& call = *of.call;
    const int in = call.in_channels, out = call.out_channels, tiles = (out + kColumns - 1) / kColumns;
    std::ptrdiff_t offsets[9];
    tap_offsets(of, strip, false, offsets);
    for (int from = 0; from < in; from += kDepth) {
        const int depth = least(kDepth, in - from);
        each_panel_pixel(strip, of.halo, depth, scratch.input, InputPixels(call, from, depth));
        Ahead ahead;
        if (from + kDepth < in)
            ahead.add(call.x + from + kDepth, call.ld_x, least(kDepth, in - from - kDepth), strip);
        else
            ahead.add(call.x, call.ld_x, least(kDepth, in), next);
        ahead.deal(tiles * tiles_of_column(of, strip, depth));
        for (int tile = 0; tile < tiles; ++tile) {
            const int column = tile * kColumns;
            TileSums sums = {scratch.pivot + column, scratch.sum + column, scratch.square + column, true};
            column_tile(of, strip, scratch.input, offsets, depth,
                        of.forward_weight + of.taps * (std::ptrdiff_t{from} * tiles + std::ptrdiff_t{tile} * depth) * kColumns,
                        call.y + strip.first * call.ld_y + column, call.ld_y, least(kColumns, out - column),
                        of.bias ? of.bias + column : nullptr, from > 0,
                        call.mean_y && from + depth == in ? &sums : nullptr, ahead);
        }
    }
    if (call.mean_y)
        add_block(scratch.moments, out, std::int64_t{strip.segments} * strip.width, scratch.pivot, scratch.sum,
                  scratch.square);
}

// Pixels of a strip whose gradients and inputs both stay in L1 while every tile of the weight is visited.
constexpr int kPixelsAtOnce = 128;

inline void add_weight_grad(const Convolution& of, const Strip& strip, const std::ptrdiff_t* offsets, int from, int depth,
                            Scratch& scratch) {
    const ShoalNormConv& call = *of.call;
    const int in_tiles = (int(call.in_channels) + kColumns - 1) / kColumns, out = call.out_channels;
    const std::ptrdiff_t row_stride = std::ptrdiff_t{strip.width + 2 * of.halo} * kPixelStride;
    const std::ptrdiff_t panel_stride = (strip.segments + 2 * of.halo) * row_stride;
    const std::ptrdiff_t inner = of.halo * (row_stride + kPixelStride);
    const int segments = least(strip.segments, strip.width < kPixelsAtOnce ? kPixelsAtOnce / strip.width : 1);
    for (int s = 0; s < strip.segments; s += segments) {
        const int count = least(segments, strip.segments - s);
        for (int tap = 0; tap < of.taps; ++tap)
            for (int column = 0; column < depth; column += kColumns)
                for (int block = 0; block < out; block += kDepth)
                    each_tile(least(kDepth, out - block), [&](int first, int rows) {
                        AllTiles::pixels[rows - 1](
                            scratch.grad + block / kDepth * panel_stride + inner + s * row_stride + first,
                            scratch.input + s * row_stride + offsets[tap] + column, count, strip.width, row_stride,
                            scratch.weight_grad +
                                (std::ptrdiff_t{tap * in_tiles + (from + column) / kColumns} * out + block + first) * kColumns);
                    });
    }
}

// at(channel, how to read and write there) for each vector of channels
template <typename At>
inline void each_vector(std::int64_t channels, At at) {
    std::int64_t c = 0;
    for (; c + kLanes <= channels; c += kLanes) at(c, Whole{});
    if (c < channels) at(c, Some{int(channels - c)});
}

// So many gradients are added up in floats before their sum goes to the doubles: where all are alike, as those of a mean
// over an image, roundings of longer sums are alike as well, and the gradient of the statistics, which takes the sum off
// every pixel again, leaves them in each.
constexpr int kGradientsInFloats = 16;

inline void clear_sums(std::int64_t channels, float* sums, float* products) {
    const std::int64_t padded = (channels + kLanes - 1) / kLanes * kLanes;
    std::memset(sums, 0, padded * sizeof(float));
    std::memset(products, 0, padded * sizeof(float));
}

// From floats to doubles.
inline void move_sums(std::int64_t channels, float* sums, float* products, double* total, double* centred) {
    for (std::int64_t c = 0; c < channels; ++c) total[c] += sums[c];
    for (std::int64_t c = 0; c < channels; ++c) centred[c] += products[c];
    clear_sums(channels, sums, products);
}

// Of one depth block: grad_x = masked da * scale, and the sums of masked da and of it times x - mean.
inline void finish_input(const ShoalNormConv& call, const Strip& strip, int from, int count, Scratch& scratch) {
    const std::int64_t pixels = std::int64_t{strip.segments} * strip.width;
    const float *mean = call.mean + from, *scale = call.scale + from, *shift = call.shift + from;
    float *sums = scratch.sum, *products = scratch.square;
    const bool relu = call.relu, accumulate = call.accumulate;
    clear_sums(count, sums, products);
    for (std::int64_t pixel = 0; pixel < pixels; ++pixel) {
        const float* x = call.x + (strip.first + pixel) * call.ld_x + from;
        const float* da = scratch.grad_input + pixel * kPixelStride;
        float* grad_x = call.grad_x + (strip.first + pixel) * call.ld_grad_x + from;
        each_vector(count, [=](std::int64_t c, auto there) {
            const Vector off = there.get(x + c) - there.get(mean + c), factor = there.get(scale + c);
            Vector grad = load(da + c);
            if (relu) grad = off * factor + there.get(shift + c) <= Vector{} ? Vector{} : grad;
            store(sums + c, load(sums + c) + grad);
            store(products + c, load(products + c) + grad * off);
            Vector result = rounded(grad * factor);
            if (accumulate) result += there.get(grad_x + c);
            there.put(grad_x + c, result);
        });
        if ((pixel + 1) % kGradientsInFloats == 0 || pixel + 1 == pixels)
            move_sums(count, sums, products, scratch.total + from, scratch.centred + from);
    }
}

void backward_strip(const Convolution& of, const Strip& strip, const Strip& next, Scratch& scratch) {
    const ShoalNormConv& call = *of.call;
    const int in = call.in_channels, out = call.out_channels, in_tiles = (in + kColumns - 1) / kColumns;
    const std::ptrdiff_t panel_stride =
        std::ptrdiff_t{strip.segments + 2 * of.halo} * (strip.width + 2 * of.halo) * kPixelStride;
    std::ptrdiff_t offsets[9], flipped[9];
    tap_offsets(of, strip, false, offsets);
    tap_offsets(of, strip, true, flipped);
    for (int block = 0; block < out; block += kDepth) {
        const int count = least(kDepth, out - block);
        each_panel_pixel(strip, of.halo, count, scratch.grad + block / kDepth * panel_stride,
                         GradPixels(call, of.grad_constant, of.grad_slope, block, count));
    }
    for (int from = 0; from < in; from += kDepth) {
        const int count = least(kDepth, in - from);
        each_panel_pixel(strip, of.halo, count, scratch.input, InputPixels(call, from, count));
        add_weight_grad(of, strip, offsets, from, count, scratch);
        Ahead ahead;
        if (from + kDepth < in) {
            ahead.add(call.x + from + kDepth, call.ld_x, least(kDepth, in - from - kDepth), strip);
        } else {
            ahead.add(call.grad_y, call.ld_grad_y, out, next);
            if (of.grad_constant) ahead.add(call.y, call.ld_y, out, next);
            ahead.add(call.x, call.ld_x, least(kDepth, in), next);
        }
        ahead.deal((count + kColumns - 1) / kColumns * ((out + kDepth - 1) / kDepth) *
                   tiles_of_column(of, strip, least(kDepth, out)));
        for (int column = 0; column < count; column += kColumns)
            for (int block = 0; block < out; block += kDepth) {
                const int depth = least(kDepth, out - block), tile = (from + column) / kColumns;
                column_tile(of, strip, scratch.grad + block / kDepth * panel_stride, flipped, depth,
                            of.backward_weight +
                                of.taps * (std::ptrdiff_t{block} * in_tiles + std::ptrdiff_t{tile} * depth) * kColumns,
                            scratch.grad_input + column, kPixelStride, kColumns, nullptr, block > 0, nullptr, ahead);
            }
        finish_input(call, strip, from, count, scratch);
    }
}

}  // namespace
}  // namespace shoal
