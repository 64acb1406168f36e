// A fused 3 x 3 convolution by Winograd's minimal algorithm F(2x2, 3x3) (Lavin and Gray, CVPR'16): results come in
// squares of 2 x 2, each from 4 x 4 pixels, by 16 products a channel pair where a direct convolution has 36. Pixels and
// weights are transformed (16 points each), multiplied point by point, which is 16 products of matrices, and transformed
// back. Both gradients are made from transforms of the same blocks.
#pragma once

#include "norm_strip.h"

namespace shoal {
namespace {

constexpr int kSquareDepth = 128, kSquareStride = kSquareDepth + 16;  // channels of a square's point that lie together
constexpr int kChunk = 32;  // channels that are normalised at a time: four rows of them stay in L1
static_assert(kChunk % kColumns == 0 && kSquareDepth % kChunk == 0);

using SquareTiles = TilesOf<kSquareStride>;

// to[4 i + j] = B' d B of the 4 x 4 pixels d, which lie `step` apart in four rows
inline void transform_pixels(const float* const* rows, std::ptrdiff_t step, float* to, std::ptrdiff_t apart) {
    const auto across = [=](int i, Vector a, Vector b, Vector c, Vector d) {
        store(to + (4 * i) * apart, a - c);
        store(to + (4 * i + 1) * apart, b + c);
        store(to + (4 * i + 2) * apart, c - b);
        store(to + (4 * i + 3) * apart, b - d);
    };
    Vector of[4], less[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) of[j] = load(rows[0] + j * step) - load(rows[2] + j * step);
    across(0, of[0], of[1], of[2], of[3]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const Vector b = load(rows[1] + j * step), c = load(rows[2] + j * step);
        of[j] = b + c;
        less[j] = c - b;
    }
    across(1, of[0], of[1], of[2], of[3]);
    across(2, less[0], less[1], less[2], less[3]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) of[j] = load(rows[1] + j * step) - load(rows[3] + j * step);
    across(3, of[0], of[1], of[2], of[3]);
}

// to = A g A' of the 2 x 2 gradients g in the middle of four rows: what the gradient of the weight sums
inline void spread_square(const float* const* rows, std::ptrdiff_t step, float* to, std::ptrdiff_t apart) {
    const auto across = [=](int i, Vector a, Vector b) {
        store(to + (4 * i) * apart, a);
        store(to + (4 * i + 1) * apart, a + b);
        store(to + (4 * i + 2) * apart, a - b);
        store(to + (4 * i + 3) * apart, -b);
    };
    const Vector a = load(rows[1] + step), b = load(rows[1] + 2 * step);
    const Vector c = load(rows[2] + step), d = load(rows[2] + 2 * step);
    across(0, a, b);
    across(1, a + c, b + d);
    across(2, a - c, b - d);
    across(3, -c, -d);
}

// The 2 x 2 results A' m A.
inline void gather_square(const float* m, std::ptrdiff_t apart, Vector* to) {
    Vector left[4], right[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const float* row = m + 4 * i * apart;
        const Vector b = load(row + apart), c = load(row + 2 * apart);
        left[i] = load(row) + b + c;
        right[i] = b - c - load(row + 3 * apart);
    }
    to[0] = left[0] + left[1] + left[2];
    to[1] = right[0] + right[1] + right[2];
    to[2] = left[1] - left[2] - left[3];
    to[3] = right[1] - right[2] - right[3];
}

// use(number of the square in `part`, channel, its four rows) for each vector of `channels` channels
template <typename Read, typename Use>
inline void each_square(const Winograd& of, const SquareRows& part, const Read& read, int channels, float* panel, Use use) {
    const ShoalNormConv& call = *of.call;
    const std::ptrdiff_t row_floats = std::ptrdiff_t{2 * of.square_columns + 2} * kChunk;
    for (int n = 0; n < part.count; ++n) {
        const std::int64_t image = (part.first + n) / of.square_rows;
        const std::int64_t top = 2 * ((part.first + n) % of.square_rows) - 1;
        // The upper two are there from the squares above.
        for (std::int64_t row = n && top > 0 ? top + 2 : top; row < top + 4; ++row) {
            float* to = panel + (row & 3) * row_floats;
            if (row < 0 || row >= call.height) {
                std::memset(to, 0, row_floats * sizeof(float));
                continue;
            }
            const std::int64_t first = (image * call.height + row) * call.width;
            std::memset(to, 0, kChunk * sizeof(float));
            to += kChunk;
            for (std::int64_t column = 0; column < call.width; ++column, to += kChunk) read(first + column, to);
            std::memset(to, 0, (2 * of.square_columns + 1 - call.width) * kChunk * sizeof(float));
        }
        for (int square = 0; square < of.square_columns; ++square)
            for (int c = 0; c < channels; c += kLanes) {
                const float* rows[4];
                for (int r = 0; r < 4; ++r) rows[r] = panel + ((top + r) & 3) * row_floats + 2 * square * kChunk + c;
                use(n * of.square_columns + square, c, rows);
            }
    }
}

// Where the points of a square lie, from channel `channel` on.
inline float* at_square(const Winograd& of, float* points, int square, int channel) {
    return points + (std::ptrdiff_t{channel / kSquareDepth * kPoints} * of.most + square) * kSquareStride + channel % kSquareDepth;
}

// Points of what `part`, some rows of a block, reads; in backward also of its gradients, for both products they are in.
void winograd_transform(const Winograd& of, const SquareRows& block, const SquareRows& part, bool backward, Scratch& scratch) {
    const ShoalNormConv& call = *of.call;
    const int in = call.in_channels, out = call.out_channels;
    const int first = int(part.first - block.first) * of.square_columns;
    const std::ptrdiff_t apart = std::ptrdiff_t{of.most} * kSquareStride;
    for (int from = 0; backward && from < out; from += kChunk) {
        const int count = least(kChunk, out - from);
        each_square(of, part, GradPixels(call, of.grad_constant, of.grad_slope, from, count), count, scratch.panel,
                    [&](int square, int c, const float* const* rows) {
                        transform_pixels(rows, kChunk, at_square(of, scratch.grad, first + square, from + c), apart);
                        spread_square(rows, kChunk, at_square(of, scratch.spread, first + square, from + c), apart);
                    });
    }
    for (int from = 0; from < in; from += kChunk) {
        const int count = least(kChunk, in - from), filled = (count + kColumns - 1) / kColumns * kColumns;
        each_square(of, part, InputPixels(call, from, count), filled, scratch.panel,
                    [&](int square, int c, const float* const* rows) {
                        transform_pixels(rows, kChunk, at_square(of, scratch.input, first + square, from + c), apart);
                    });
    }
}

// A column tile's products at every point, over all channels of `points`.
inline void multiply_points(const Winograd& of, int squares, const float* points, int depth, const float* weight,
                            float* products, Ahead& ahead) {
    const std::ptrdiff_t offset = 0;
    for (int point = 0; point < kPoints; ++point, products += std::ptrdiff_t{of.most} * kColumns)
        for (int from = 0; from < depth; from += kSquareDepth) {
            const int some = least(kSquareDepth, depth - from);
            const float* panel = points + std::ptrdiff_t{from / kSquareDepth * kPoints + point} * of.most * kSquareStride;
            each_tile(squares, [&](int first, int rows) {
                float* to = products + first * kColumns;
                ahead.step();
                SquareTiles::rows[rows - 1](panel + std::ptrdiff_t{first} * kSquareStride, &offset, 1, some, weight, to,
                                            kColumns, from ? to : nullptr, kColumns, nullptr);
            });
            weight += std::ptrdiff_t{some} * kColumns;
        }
}

// use(number of a square's pixel in 0 .. 3, its number among all pixels) for those inside the image
template <typename Use>
inline void each_pixel(const Winograd& of, const SquareRows& block, int row, int square, Use use) {
    const ShoalNormConv& call = *of.call;
    const std::int64_t image = (block.first + row) / of.square_rows;
    const std::int64_t y = 2 * ((block.first + row) % of.square_rows), x = 2 * square;
    const std::int64_t first = (image * call.height + y) * call.width + x;
    const bool right = x + 1 < call.width, below = y + 1 < call.height;
    use(0, first);
    if (right) use(1, first + 1);
    if (below) use(2, first + call.width);
    if (right && below) use(3, first + call.width + 1);
}

// at(vector's first channel in the tile, how to read and write there) for each vector of a column tile
template <typename At>
inline void each_tile_vector(std::int64_t channels, At at) {
    for (int v = 0; v < kTileVectors && v * kLanes < channels; ++v) {
        if (channels - v * kLanes >= kLanes)
            at(v * kLanes, Whole{});
        else
            at(v * kLanes, Some{int(channels - v * kLanes)});
    }
}

inline void write_results(const Winograd& of, const SquareRows& block, int column, Scratch& scratch) {
    const ShoalNormConv& call = *of.call;
    const std::ptrdiff_t apart = std::ptrdiff_t{of.most} * kColumns;
    each_tile_vector(call.out_channels - column, [&](int v, auto there) {
        const float* product = scratch.product + v;
        const Vector bias = of.bias ? load(of.bias + column + v) : Vector{};
        Vector pivot = {}, sum = {}, square = {}, results[4];
        for (int row = 0; row < block.count; ++row) {
            Vector row_sum = {}, row_square = {};  // a block may have many pixels: fewer roundings
            for (int s = 0; s < of.square_columns; ++s, product += kColumns) {
                gather_square(product, apart, results);
                if (!row && !s) pivot = results[0] + bias;
                each_pixel(of, block, row, s, [&](int which, std::int64_t pixel) {
                    const Vector y = results[which] + bias, off = y - pivot;
                    row_sum += off;
                    row_square += off * off;
                    there.put(call.y + pixel * call.ld_y + column + v, y);
                });
            }
            sum += row_sum;
            square += row_square;
        }
        store(scratch.pivot + column + v, pivot);
        store(scratch.sum + column + v, sum);
        store(scratch.square + column + v, square);
    });
}

// The pixels that squares read, as one run.
inline Strip run_of(const Winograd& of, const SquareRows& block) {
    const ShoalNormConv& call = *of.call;
    if (!block.count) return {0, 0, 0, false, false};
    const auto row_of = [&](std::int64_t rows, int off, std::int64_t from, std::int64_t to) {
        const std::int64_t row = 2 * (rows % of.square_rows) + off;
        return rows / of.square_rows * call.height + (row < from ? from : least(row, to));
    };
    const std::int64_t first = row_of(block.first, -1, 0, call.height);
    const std::int64_t last = row_of(block.first + block.count - 1, 3, 0, call.height);
    return {first * call.width, 1, int((last - first) * call.width), false, false};
}

inline std::int64_t tiles_of(int squares) { return (squares + kTileRows - 1) / kTileRows; }

// Column tiles `tiles` of a block whose points are there; `scratch` has the weights of those tiles, and in backward the
// sums of their gradients.
void winograd_forward(const Winograd& of, const SquareRows& block, const SquareRows& next, Rows tiles, Scratch& scratch) {
    const ShoalNormConv& call = *of.call;
    const int in = call.in_channels, squares = block.count * of.square_columns;
    Ahead ahead;
    ahead.add(call.x, call.ld_x, in, run_of(of, next));
    const int depths = (in + kSquareDepth - 1) / kSquareDepth;
    ahead.deal(kPoints * depths * (tiles.last - tiles.first) * tiles_of(squares));
    const float* weight = scratch.weight;
    for (std::int64_t tile = tiles.first; tile < tiles.last; ++tile, weight += std::ptrdiff_t{kPoints} * in * kColumns) {
        multiply_points(of, squares, scratch.input, in, weight, scratch.product, ahead);
        write_results(of, block, int(tile) * kColumns, scratch);
    }
}

// sums[point][out][column] += over squares: spread gradient times transformed input, for one tile of channels in
inline void add_points(const Winograd& of, int squares, int tile, const Scratch& scratch, float* tile_sums) {
    const int out = of.call->out_channels;
    for (int point = 0; point < kPoints; ++point)
        for (int from = 0; from < out; from += kSquareDepth) {
            const std::ptrdiff_t above = std::ptrdiff_t{point} * of.most * kSquareStride;
            const float* grads = at_square(of, scratch.spread, 0, from) + above;
            const float* inputs = at_square(of, scratch.input, 0, tile * kColumns) + above;
            float* sums = tile_sums + (std::ptrdiff_t{point} * out + from) * kColumns;
            each_tile(least(kSquareDepth, out - from), [&](int first, int rows) {
                SquareTiles::pixels[rows - 1](grads + first, inputs, 1, squares, 0, sums + std::ptrdiff_t{first} * kColumns);
            });
        }
}

// grad_x = masked da * scale, and the sums of masked da and of it times x - mean
inline void write_gradients(const Winograd& of, const SquareRows& block, int column, Scratch& scratch) {
    const ShoalNormConv& call = *of.call;
    const std::ptrdiff_t apart = std::ptrdiff_t{of.most} * kColumns;
    const bool relu = call.relu, accumulate = call.accumulate;
    each_tile_vector(call.in_channels - column, [&](int v, auto there) {
        const int channel = column + v;
        const float* product = scratch.product + v;
        const Vector mean = there.get(call.mean + channel), scale = there.get(call.scale + channel);
        const Vector shift = there.get(call.shift + channel);
        double total[kLanes] = {}, centred[kLanes] = {};
        Vector sum = {}, sum_of_centred = {}, results[4];
        for (int row = 0; row < block.count; ++row) {
            for (int s = 0; s < of.square_columns; ++s, product += kColumns) {
                gather_square(product, apart, results);
                each_pixel(of, block, row, s, [&](int which, std::int64_t pixel) {
                    const Vector off = there.get(call.x + pixel * call.ld_x + channel) - mean;
                    Vector da = results[which];
                    if (relu) da = off * scale + shift <= Vector{} ? Vector{} : da;
                    sum += da;
                    sum_of_centred += da * off;
                    float* to = call.grad_x + pixel * call.ld_grad_x + channel;
                    Vector result = rounded(da * scale);
                    if (accumulate) result += there.get(to);
                    there.put(to, result);
                });
                if ((s + 1) % (kGradientsInFloats / 4) && s + 1 < of.square_columns) continue;
                for (int lane = 0; lane < kLanes; ++lane) total[lane] += sum[lane];
                for (int lane = 0; lane < kLanes; ++lane) centred[lane] += sum_of_centred[lane];
                sum = sum_of_centred = Vector{};
            }
        }
        for (int lane = 0; lane < kLanes && channel + lane < call.in_channels; ++lane) {
            scratch.total[channel + lane] += total[lane];
            scratch.centred[channel + lane] += centred[lane];
        }
    });
}

void winograd_backward(const Winograd& of, const SquareRows& block, const SquareRows& next, Rows tiles, Scratch& scratch) {
    const ShoalNormConv& call = *of.call;
    const int in = call.in_channels, out = call.out_channels, squares = block.count * of.square_columns;
    Ahead ahead;
    const Strip run = run_of(of, next);
    ahead.add(call.grad_y, call.ld_grad_y, out, run);
    if (of.grad_constant) ahead.add(call.y, call.ld_y, out, run);
    ahead.add(call.x, call.ld_x, in, run);
    const int depths = (out + kSquareDepth - 1) / kSquareDepth;
    ahead.deal(kPoints * depths * (tiles.last - tiles.first) * tiles_of(squares));
    const std::ptrdiff_t tile_floats = std::ptrdiff_t{kPoints} * out * kColumns;
    const float* weight = scratch.weight;
    float* sums = scratch.weight_grad;
    for (std::int64_t tile = tiles.first; tile < tiles.last; ++tile, weight += tile_floats, sums += tile_floats) {
        add_points(of, squares, int(tile), scratch, sums);
        multiply_points(of, squares, scratch.grad, out, weight, scratch.product, ahead);
        write_gradients(of, block, int(tile) * kColumns, scratch);
    }
}

// G w G' of one vector of 3 x 3 weights
inline void transform_weight(const Vector* w, Vector* to) {
    Vector down[4][3];
#pragma GCC unroll 3
    for (int j = 0; j < 3; ++j) {
        const Vector sides = w[j] + w[6 + j];
        down[0][j] = w[j];
        down[1][j] = 0.5f * (sides + w[3 + j]);
        down[2][j] = 0.5f * (sides - w[3 + j]);
        down[3][j] = w[6 + j];
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const Vector sides = down[i][0] + down[i][2];
        to[4 * i] = down[i][0];
        to[4 * i + 1] = 0.5f * (sides + down[i][1]);
        to[4 * i + 2] = 0.5f * (sides - down[i][1]);
        to[4 * i + 3] = down[i][2];
    }
}

// `count` weights along the input channels, tap by tap, in the order of the taps or turned around
inline void load_weight(const ShoalNormConv& call, std::int64_t out, std::int64_t in, int count, bool turned, Vector* to) {
    const float* corner = call.weight + out * call.weight_out + in * call.weight_in;
    for (int tap = 0; tap < 9; ++tap) {
        const float* from = corner + tap * call.weight_tap;
        Vector& w = to[turned ? 8 - tap : tap];
        if (call.weight_in == 1) {
            w = count == kLanes ? load(from) : load_some(from, count);
            continue;
        }
        float values[kLanes] = {};
        for (int lane = 0; lane < count; ++lane) values[lane] = from[lane * call.weight_in];
        w = load(values);
    }
}

// One column tile of the transformed weight, [point][depth][column]: columns are channels out, depth channels in.
void winograd_forward_weight(const ShoalNormConv& call, std::int64_t tile, float* to) {
    const std::int64_t in = call.in_channels, filled = least(kColumns, call.out_channels - tile * kColumns);
    alignas(64) float block[kPoints][kColumns][kLanes] = {};
    for (std::int64_t from = 0; from < in; from += kLanes) {
        const int count = least(kLanes, in - from);
        for (std::int64_t column = 0; column < filled; ++column) {
            Vector taps[9], points[kPoints];
            load_weight(call, tile * kColumns + column, from, count, false, taps);
            transform_weight(taps, points);
            for (int point = 0; point < kPoints; ++point) store(block[point][column], points[point]);
        }
        for (int point = 0; point < kPoints; ++point)
            for (int lane = 0; lane < count; ++lane)
                for (int column = 0; column < kColumns; ++column)
                    to[(point * in + from + lane) * kColumns + column] = block[point][column][lane];
    }
}

// The same for the gradient of the input: columns are channels in, depth channels out, the taps turned around.
void winograd_backward_weight(const ShoalNormConv& call, std::int64_t tile, float* to) {
    for (std::int64_t out = 0; out < call.out_channels; ++out)
        for (int v = 0; v < kColumns; v += kLanes) {
            const std::int64_t in = tile * kColumns + v, left = call.in_channels - in;
            Vector taps[9] = {}, points[kPoints];
            if (left > 0) load_weight(call, out, in, least(kLanes, left), true, taps);
            transform_weight(taps, points);
            for (int point = 0; point < kPoints; ++point)
                store(to + (point * call.out_channels + out) * kColumns + v, points[point]);
        }
}

// The weight's gradient for one tile of channels in, G' u G, where u adds up what threads summed, `next` floats apart.
void winograd_weight_grad(const ShoalNormConv& call, const float* sums, std::ptrdiff_t next, int parts, std::int64_t tile) {
    const std::int64_t in = call.in_channels;
    for (std::int64_t out = 0; out < call.out_channels; ++out)
        each_tile_vector(in - tile * kColumns, [&](int v, auto there) {
            Vector points[kPoints], down[3][4];
            for (int point = 0; point < kPoints; ++point) {
                const float* at = sums + (point * call.out_channels + out) * kColumns + v;
                points[point] = load(at);
                for (int part = 1; part < parts; ++part) points[point] += load(at + part * next);
            }
            for (int j = 0; j < 4; ++j) {
                const Vector sum = 0.5f * (points[4 + j] + points[8 + j]);
                down[0][j] = points[j] + sum;
                down[1][j] = 0.5f * (points[4 + j] - points[8 + j]);
                down[2][j] = sum + points[12 + j];
            }
            float* to = call.grad_weight + out * 9 * in + tile * kColumns + v;
            for (int i = 0; i < 3; ++i) {
                const Vector sum = 0.5f * (down[i][1] + down[i][2]);
                there.put(to + 3 * i * in, down[i][0] + sum);
                there.put(to + (3 * i + 1) * in, 0.5f * (down[i][1] - down[i][2]));
                there.put(to + (3 * i + 2) * in, sum + down[i][3]);
            }
        });
}

}  // namespace
}  // namespace shoal
