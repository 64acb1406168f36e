// A fused 3 x 3 convolution in squares of 2 x 2 results: rows of squares dealt out to threads, and what they found.
#include <algorithm>
#include <vector>

#include "norm_threads.h"

namespace shoal {
namespace {

constexpr std::int64_t kPoints = 16;
constexpr std::int64_t kPointBytes = 384 << 10;  // of a block: most of the smallest second cache in use
constexpr std::int64_t kFewSquares = 48, kManySquares = 96;

struct SquareWork {
    Winograd of;
    std::int64_t square_rows, rows_of_block, blocks;
    int threads;
    std::vector<Scratch> scratch;
    float *weight, *bias = nullptr, *constant = nullptr, *slope = nullptr;
    std::int64_t tiles, weight_grad_floats, bytes;

    SquareWork(const ShoalNormConv& call, const Level& level, bool backward) : of{} {
        of.call = &call;
        of.square_rows = int((call.height + 1) / 2);
        of.square_columns = int((call.width + 1) / 2);
        square_rows = call.images * of.square_rows;
        const std::int64_t channels = backward ? call.in_channels + 2 * call.out_channels : call.in_channels;
        const std::int64_t fit = kPointBytes / (kPoints * channels * std::int64_t{sizeof(float)});
        const std::int64_t squares = std::clamp(fit, kFewSquares, kManySquares);
        rows_of_block = std::max<std::int64_t>(1, squares / of.square_columns);
        blocks = up((square_rows + rows_of_block - 1) / rows_of_block, call.threads);
        rows_of_block = (square_rows + blocks - 1) / blocks;
        blocks = (square_rows + rows_of_block - 1) / rows_of_block;
        threads = int(std::min<std::int64_t>(call.threads, blocks));
        of.most = int(rows_of_block * of.square_columns);

        const std::int64_t padded_in = up(call.in_channels, level.columns), padded_out = up(call.out_channels, level.columns);
        tiles = (backward ? padded_in : padded_out) / level.columns;
        weight_grad_floats = kPoints * padded_in * call.out_channels;
        const auto points = [&](std::int64_t depth) {
            return up(depth, level.square_depth) / level.square_depth * kPoints * of.most * level.square_pitch;
        };
        Workspace space(call.workspace);
        weight = space.take<float>(kPoints * (backward ? call.out_channels * padded_in : call.in_channels * padded_out));
        if (backward) {
            constant = space.take<float>(call.out_channels);
            slope = space.take<float>(call.out_channels);
        } else {
            bias = space.take<float>(padded_out);
        }
        scratch.resize(threads);
        for (Scratch& own : scratch) {
            own = {};
            own.panel = space.take<float>(4 * (2 * of.square_columns + 2) * level.chunk);
            own.input = space.take<float>(points(call.in_channels));
            own.product = space.take<float>(kPoints * of.most * level.columns);
            if (backward) {
                own.grad = space.take<float>(points(call.out_channels));
                own.spread = space.take<float>(points(call.out_channels));
                own.weight_grad = space.take<float>(weight_grad_floats);
                own.total = space.take<double>(call.in_channels);
                own.centred = space.take<double>(call.in_channels);
            } else {
                own.pivot = space.take<float>(padded_out);
                own.sum = space.take<float>(padded_out);
                own.square = space.take<float>(padded_out);
                own.moments = {0, space.take<double>(call.out_channels), space.take<double>(call.out_channels)};
            }
        }
        bytes = space.bytes;
    }

    // Block `number`; an empty one from `end` on.
    SquareRows operator()(std::int64_t number, std::int64_t end) const {
        if (number >= end) return {0, 0};
        const std::int64_t first = number * rows_of_block;
        return {first, int(std::min(rows_of_block, square_rows - first))};
    }
};

}  // namespace

std::int64_t winograd_workspace_bytes(const ShoalNormConv& call, const Level& level, bool backward) {
    return SquareWork(call, level, backward).bytes;
}

void winograd_forward(const ShoalNormConv& call, const Level& level) {
    SquareWork work(call, level, false);
    work.of.weight = work.weight;
    if (call.bias) {
        std::fill(std::copy_n(call.bias, call.out_channels, work.bias), work.bias + work.tiles * level.columns, 0.0f);
        work.of.bias = work.bias;
    }
    on_threads(work.threads, [&](int thread) {
        on_share(work.tiles, thread, work.threads, [&](std::int64_t tile, std::int64_t) {
            level.winograd_forward_weight(call, tile, work.weight + tile * kPoints * call.in_channels * level.columns);
        });
    });
    on_threads(work.threads, [&](int thread) {
        Scratch& own = work.scratch[thread];
        std::fill_n(own.moments.mean, call.out_channels, 0.0);
        std::fill_n(own.moments.squares, call.out_channels, 0.0);
        on_share(work.blocks, thread, work.threads, [&](std::int64_t block, std::int64_t last) {
            level.winograd_forward(work.of, work(block, last), work(block + 1, last), own);
        });
    });
    if (call.mean_y) finish_moments(work.scratch, call.out_channels, call.mean_y, call.variance_y);
}

void winograd_backward(const ShoalNormConv& call, const Level& level) {
    SquareWork work(call, level, true);
    work.of.weight = work.weight;
    if (call.grad_mean_y) {
        line_of_statistics(call, work.constant, work.slope);
        work.of.grad_constant = work.constant;
        work.of.grad_slope = work.slope;
    }
    on_threads(work.threads, [&](int thread) {
        on_share(work.tiles, thread, work.threads, [&](std::int64_t tile, std::int64_t) {
            level.winograd_backward_weight(call, tile, work.weight + tile * kPoints * call.out_channels * level.columns);
        });
    });
    on_threads(work.threads, [&](int thread) {
        Scratch& own = work.scratch[thread];
        std::fill_n(own.weight_grad, work.weight_grad_floats, 0.0f);
        std::fill_n(own.total, call.in_channels, 0.0);
        std::fill_n(own.centred, call.in_channels, 0.0);
        on_share(work.blocks, thread, work.threads, [&](std::int64_t block, std::int64_t last) {
            level.winograd_backward(work.of, work(block, last), work(block + 1, last), own);
        });
    });
    on_threads(work.threads, [&](int thread) {
        on_share(call.out_channels, thread, work.threads, [&](std::int64_t out, std::int64_t) {
            level.winograd_weight_grad(call, work.scratch.data(), work.threads, out);
        });
    });
    finish_sums(work.scratch, call.in_channels, call.grad_shift, call.grad_scale);
}

}  // namespace shoal
