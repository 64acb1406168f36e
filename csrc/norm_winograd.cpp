// A fused 3 x 3 convolution by Winograd's F(2x2, 3x3), in squares of 2 x 2 results: how threads share the work.
//
// Where the transformed weight stays in L2, every thread has blocks of squares of its own. A wide weight would
// come from memory with every block, and its gradient be kept once a thread: there all threads make the points of one
// large block, and then each has some of the column tiles, whose weights it transforms one by one.
#include <algorithm>
#include <vector>

#include "norm_threads.h"

namespace shoal {
namespace {

constexpr std::int64_t kWide = 1 << 15;            // channels in times channels out
constexpr std::int64_t kPointBytes = 384 << 10;    // of a block: most of the smallest L2 in use
constexpr std::int64_t kFewSquares = 48, kManySquares = 96;
constexpr std::int64_t kSharedBytes = 12 << 20;    // of a block that all threads share: it stays in L3
constexpr std::int64_t kFewShared = 128, kManyShared = 1024;

struct SquareWork {
    Winograd of;
    bool shared, in_one;  // in_one: there is one block, so that a tile's gradients are summed once
    std::int64_t square_rows, rows_of_block, blocks;
    int threads;
    std::vector<Scratch> scratch;
    float *bias = nullptr, *constant = nullptr, *slope = nullptr;
    std::int64_t tiles, weight_tile_floats, weight_grad_tile_floats, bytes;

    SquareWork(const ShoalNormConv& call, const Level& level, bool backward)
        : of{}, shared(call.in_channels * call.out_channels >= kWide), in_one(false) {
        const std::int64_t padded_in = up(call.in_channels, level.columns), padded_out = up(call.out_channels, level.columns);
        tiles = (backward ? padded_in : padded_out) / level.columns;
        weight_tile_floats = kPoints * (backward ? call.out_channels : call.in_channels) * level.columns;
        weight_grad_tile_floats = kPoints * call.out_channels * level.columns;
        of.call = &call;
        of.square_rows = int((call.height + 1) / 2);
        of.square_columns = int((call.width + 1) / 2);
        cut(call, backward);
        Workspace space(call.workspace);
        float* weight = shared ? nullptr : space.take<float>(tiles * weight_tile_floats);
        if (backward) {
            constant = space.take<float>(call.out_channels);
            slope = space.take<float>(call.out_channels);
        } else {
            bias = space.take<float>(padded_out);
        }
        const auto points = [&](std::int64_t depth) {
            return space.take<float>(up(depth, level.square_depth) / level.square_depth * kPoints * of.most * level.square_stride);
        };
        scratch.resize(threads);
        for (Scratch& own : scratch) {
            const bool first = &own == scratch.data();
            own = first || !shared ? Scratch{} : scratch[0];
            own.panel = space.take<float>(4 * (2 * of.square_columns + 2) * level.chunk);
            own.product = space.take<float>(kPoints * of.most * level.columns);
            own.weight = shared ? space.take<float>(weight_tile_floats) : weight;
            if (backward && (first || !shared || in_one))
                own.weight_grad = space.take<float>((in_one ? 1 : tiles) * weight_grad_tile_floats);
            if (shared && !first) continue;
            own.input = points(call.in_channels);
            if (backward) {
                own.grad = points(call.out_channels);
                own.spread = points(call.out_channels);
            }
            take_results(space, call, padded_out, backward, own);
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

    // body(tile) for all column tiles, each by one of the threads
    template <typename Body>
    void each_column_tile(Body body) const {
        on_threads(threads, [&](int thread) {
            on_share(tiles, thread, threads, [&](std::int64_t tile, std::int64_t) { body(tile); });
        });
    }

    // weigh(tile, where), transform(block, part of its rows, scratch), multiply(block, next, column tiles, scratch), and
    // done(block, scratch) when all its tiles are; blocks one after another or side by side.
    template <typename Weigh, typename Transform, typename Multiply, typename Done>
    void run(Weigh weigh, Transform transform, Multiply multiply, Done done) {
        if (!shared) {
            each_column_tile([&](std::int64_t tile) { weigh(tile, scratch[0].weight + tile * weight_tile_floats); });
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
                on_share(tiles, thread, threads, [&](std::int64_t tile, std::int64_t) {
                    weigh(tile, scratch[thread].weight);
                    multiply(now, SquareRows{0, 0}, Rows{tile, tile + 1}, scratch[thread]);
                });
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
        in_one = shared && blocks == 1;
    }
};

}  // namespace

std::int64_t winograd_workspace_bytes(const ShoalNormConv& call, const Level& level, bool backward) {
    return SquareWork(call, level, backward).bytes;
}

void winograd_forward(const ShoalNormConv& call, const Level& level) {
    SquareWork work(call, level, false);
    if (call.bias) {
        std::fill(std::copy_n(call.bias, call.out_channels, work.bias), work.bias + work.tiles * level.columns, 0.0f);
        work.of.bias = work.bias;
    }
    std::vector<Scratch> parts = work.parts();
    for (const Scratch& own : parts) {
        std::fill_n(own.moments.mean, call.out_channels, 0.0);
        std::fill_n(own.moments.squares, call.out_channels, 0.0);
    }
    work.run(
        [&](std::int64_t tile, float* to) { level.winograd_forward_weight(call, tile, to); },
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
    if (call.grad_mean_y) {
        line_of_statistics(call, work.constant, work.slope);
        work.of.grad_constant = work.constant;
        work.of.grad_slope = work.slope;
    }
    const std::vector<Scratch> parts = work.parts();
    const std::int64_t tile_floats = work.weight_grad_tile_floats;
    if (!work.in_one)
        work.each_column_tile([&](std::int64_t tile) {
            for (const Scratch& own : parts) std::fill_n(own.weight_grad + tile * tile_floats, tile_floats, 0.0f);
        });
    for (const Scratch& own : parts) {
        std::fill_n(own.total, call.in_channels, 0.0);
        std::fill_n(own.centred, call.in_channels, 0.0);
    }
    work.run(
        [&](std::int64_t tile, float* to) { level.winograd_backward_weight(call, tile, to); },
        [&](const SquareRows& block, const SquareRows& part, Scratch& own) {
            level.winograd_transform(work.of, block, part, true, own);
        },
        [&](const SquareRows& block, const SquareRows& next, Rows tiles, Scratch own) {
            if (work.in_one)
                std::fill_n(own.weight_grad, tile_floats, 0.0f);
            else
                own.weight_grad += tiles.first * tile_floats;
            level.winograd_backward(work.of, block, next, tiles, own);
            if (work.in_one) level.winograd_weight_grad(call, own.weight_grad, 0, 1, tiles.first);
        },
        [](const SquareRows&, Scratch&) {});
    if (!work.in_one) {
        const std::ptrdiff_t next = parts.size() > 1 ? parts[1].weight_grad - parts[0].weight_grad : 0;
        work.each_column_tile([&](std::int64_t tile) {
            level.winograd_weight_grad(call, parts[0].weight_grad + tile * tile_floats, next, int(parts.size()), tile);
        });
    }
    finish_sums(parts, call.in_channels, call.grad_shift, call.grad_scale);
}

}  // namespace shoal
