// A fused 3 x 3 convolution in squares of 2 x 2 results: what is dealt out to threads, and what they found.
//
// Where the transformed weight stays in a second cache, every thread has blocks of squares of its own. A wide weight would
// come from memory with every block, and its gradient be kept once a thread: there all threads make the points of one
// large block, and then each has some of the column tiles.
#include <algorithm>
#include <vector>

#include "norm_threads.h"

namespace shoal {
namespace {

constexpr std::int64_t kWide = 1 << 15;            // channels in times channels out
constexpr std::int64_t kPointBytes = 384 << 10;    // of a block: most of the smallest second cache in use
constexpr std::int64_t kFewSquares = 48, kManySquares = 96;
constexpr std::int64_t kSharedBytes = 12 << 20;    // of a block that all threads share: it stays in the last cache
constexpr std::int64_t kFewShared = 128, kManyShared = 1024;

struct SquareWork {
    Winograd of;
    bool shared;
    std::int64_t square_rows, rows_of_block, blocks;
    int threads;
    std::vector<Scratch> scratch;
    float *weight, *bias = nullptr, *constant = nullptr, *slope = nullptr;
    std::int64_t tiles, weight_grad_floats, bytes;

    SquareWork(const ShoalNormConv& call, const Level& level, bool backward)
        : of{}, shared(call.in_channels * call.out_channels >= kWide) {
        const std::int64_t padded_in = up(call.in_channels, level.columns), padded_out = up(call.out_channels, level.columns);
        tiles = (backward ? padded_in : padded_out) / level.columns;
        weight_grad_floats = kPoints * padded_in * call.out_channels;
        of.call = &call;
        of.square_rows = int((call.height + 1) / 2);
        of.square_columns = int((call.width + 1) / 2);
        cut(call, backward);
        Workspace space(call.workspace);
        weight = space.take<float>(kPoints * (backward ? call.out_channels * padded_in : call.in_channels * padded_out));
        if (backward) {
            constant = space.take<float>(call.out_channels);
            slope = space.take<float>(call.out_channels);
        } else {
            bias = space.take<float>(padded_out);
        }
        const auto points = [&](std::int64_t depth) {
            return space.take<float>(up(depth, level.square_depth) / level.square_depth * kPoints * of.most * level.square_pitch);
        };
        scratch.resize(threads);
        for (Scratch& own : scratch) {
            const bool first = &own == scratch.data();
            own = first || !shared ? Scratch{} : scratch[0];
            own.panel = space.take<float>(4 * (2 * of.square_columns + 2) * level.chunk);
            own.product = space.take<float>(kPoints * of.most * level.columns);
            if (shared && !first) continue;
            own.input = points(call.in_channels);
            if (backward) {
                own.grad = points(call.out_channels);
                own.spread = points(call.out_channels);
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
    SquareRows block(std::int64_t number, std::int64_t end) const {
        if (number >= end) return {0, 0};
        const std::int64_t first = number * rows_of_block;
        return {first, int(std::min(rows_of_block, square_rows - first))};
    }

    // What results there are in a block.
    std::int64_t pixels(const SquareRows& block) const {
        std::int64_t rows = 0;
        for (int n = 0; n < block.count; ++n)
            rows += std::min<std::int64_t>(2, of.call->height - 2 * ((block.first + n) % of.square_rows));
        return rows * of.call->width;
    }

    // Whose sums there are: every thread's own, or those of all.
    std::vector<Scratch> parts() const { return {scratch.begin(), shared ? scratch.begin() + 1 : scratch.end()}; }

    // body(tile) of one thread's share of the column tiles.
    template <typename Body>
    void each_tile(Body body) const {
        on_threads(int(std::min<std::int64_t>(of.call->threads, tiles)), [&](int thread) {
            on_share(tiles, thread, int(std::min<std::int64_t>(of.call->threads, tiles)),
                     [&](std::int64_t tile, std::int64_t) { body(tile); });
        });
    }

    // transform(block, part of its rows, scratch), multiply(block, next, column tiles, scratch), and done(block, scratch)
    // when all its tiles are; blocks one after another or side by side.
    template <typename Transform, typename Multiply, typename Done>
    void run(Transform transform, Multiply multiply, Done done) {
        if (!shared) {
            on_threads(threads, [&](int thread) {
                Scratch& own = scratch[thread];
                on_share(blocks, thread, threads, [&](std::int64_t number, std::int64_t last) {
                    const SquareRows now = block(number, last);
                    transform(now, now, own);
                    multiply(now, block(number + 1, last), Rows{0, tiles}, own);
                    done(now, own);
                });
            });
            return;
        }
        for (std::int64_t number = 0; number < blocks; ++number) {
            const SquareRows now = block(number, blocks);
            on_threads(threads, [&](int thread) {
                const std::int64_t first = std::int64_t{now.count} * thread / threads;
                const std::int64_t last = std::int64_t{now.count} * (thread + 1) / threads;
                transform(now, SquareRows{now.first + first, int(last - first)}, scratch[thread]);
            });
            on_threads(threads, [&](int thread) {
                multiply(now, SquareRows{0, 0}, Rows{tiles * thread / threads, tiles * (thread + 1) / threads}, scratch[thread]);
            });
            done(now, scratch[0]);
        }
    }

private:
    void cut(const ShoalNormConv& call, bool backward) {
        square_rows = call.images * of.square_rows;
        const std::int64_t channels = backward ? call.in_channels + 2 * call.out_channels : call.in_channels;
        const std::int64_t fit = (shared ? kSharedBytes : kPointBytes) / (kPoints * channels * std::int64_t{sizeof(float)});
        const std::int64_t squares =
            shared ? std::clamp(fit, kFewShared, kManyShared) : std::clamp(fit, kFewSquares, kManySquares);
        rows_of_block = std::max<std::int64_t>(1, squares / of.square_columns);
        blocks = up((square_rows + rows_of_block - 1) / rows_of_block, shared ? 1 : call.threads);
        rows_of_block = (square_rows + blocks - 1) / blocks;
        blocks = (square_rows + rows_of_block - 1) / rows_of_block;
        threads = int(std::min<std::int64_t>(call.threads, shared ? tiles : blocks));
        of.most = int(rows_of_block * of.square_columns);
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
    work.each_tile([&](std::int64_t tile) {
        level.winograd_forward_weight(call, tile, work.weight + tile * kPoints * call.in_channels * level.columns);
    });
    std::vector<Scratch> parts = work.parts();
    for (const Scratch& own : parts) {
        std::fill_n(own.moments.mean, call.out_channels, 0.0);
        std::fill_n(own.moments.squares, call.out_channels, 0.0);
    }
    work.run(
        [&](const SquareRows& block, const SquareRows& part, Scratch& own) {
            level.winograd_transform(work.of, block, part, false, own);
        },
        [&](const SquareRows& block, const SquareRows& next, Rows tiles, Scratch& own) {
            level.winograd_forward(work.of, block, next, tiles, own);
        },
        [&](const SquareRows& block, Scratch& own) {
            if (call.mean_y) add_block(own.moments, call.out_channels, work.pixels(block), own.pivot, own.sum, own.square);
        });
    if (call.mean_y) finish_moments(work.parts(), call.out_channels, call.mean_y, call.variance_y);
}

void winograd_backward(const ShoalNormConv& call, const Level& level) {
    SquareWork work(call, level, true);
    work.of.weight = work.weight;
    if (call.grad_mean_y) {
        line_of_statistics(call, work.constant, work.slope);
        work.of.grad_constant = work.constant;
        work.of.grad_slope = work.slope;
    }
    const std::vector<Scratch> parts = work.parts();
    const std::int64_t tile_floats = work.weight_grad_floats / work.tiles;
    work.each_tile([&](std::int64_t tile) {
        level.winograd_backward_weight(call, tile, work.weight + tile * kPoints * call.out_channels * level.columns);
        for (const Scratch& own : parts) std::fill_n(own.weight_grad + tile * tile_floats, tile_floats, 0.0f);
    });
    for (const Scratch& own : parts) {
        std::fill_n(own.total, call.in_channels, 0.0);
        std::fill_n(own.centred, call.in_channels, 0.0);
    }
    work.run(
        [&](const SquareRows& block, const SquareRows& part, Scratch& own) {
            level.winograd_transform(work.of, block, part, true, own);
        },
        [&](const SquareRows& block, const SquareRows& next, Rows tiles, Scratch& own) {
            level.winograd_backward(work.of, block, next, tiles, own);
        },
        [](const SquareRows&, Scratch&) {});
    work.each_tile([&](std::int64_t tile) { level.winograd_weight_grad(call, parts.data(), int(parts.size()), tile); });
    finish_sums(parts, call.in_channels, call.grad_shift, call.grad_scale);
}

}  // namespace shoal
