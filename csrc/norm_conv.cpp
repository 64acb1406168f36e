// Fused normalise + ReLU + convolution + statistics: strips dealt out to threads, and what the threads found put together.
#include "norm_threads.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace shoal {
namespace {

// A third of the smallest L2 in use: the weight, the result and what streams by need room too.
constexpr std::int64_t kPanelBytes = 160 << 10;

// How a call is cut: into strips of whole image rows where a tap reaches over them, else into runs of pixels.
class Cut {
public:
    Cut(const ShoalNormConv& call, const Level& level, bool backward)
        : halo(call.kernel / 2), pixels_(call.images * call.height * call.width), height_(call.height), width_(call.width) {
        const std::int64_t panels = backward ? up(call.out_channels, level.depth) / level.depth + 2 : 1;
        const std::int64_t channels =
            std::min<std::int64_t>(call.in_channels, level.depth) * (backward ? 2 : 1) + (backward ? call.out_channels : 0);
        const std::int64_t fit = kPanelBytes / (channels * std::int64_t{sizeof(float)});
        if (halo) {
            const std::int64_t most = std::clamp<std::int64_t>(fit / (width_ + 2) - 2, 2, 14);
            per_image_ = (height_ + most - 1) / most;
            height_of_strip = (height_ + per_image_ - 1) / per_image_;
            per_image_ = (height_ + height_of_strip - 1) / height_of_strip;
            strips = call.images * per_image_;
            width_of_strip = width_;
        } else {
            const std::int64_t most = std::clamp<std::int64_t>(fit, 4 * level.rows, 16 * level.rows);
            strips = up((pixels_ + most - 1) / most, call.threads);
            width_of_strip = up((pixels_ + strips - 1) / strips, level.rows);
            strips = (pixels_ + width_of_strip - 1) / width_of_strip;
            height_of_strip = 1;
        }
        panel_floats = (height_of_strip + 2 * halo) * (width_of_strip + 2 * halo) * level.pixel_stride;
        grad_floats = backward ? (panels - 2) * panel_floats : 0;
        grad_input_floats = backward ? height_of_strip * width_of_strip * level.pixel_stride : 0;
    }

    // Strip `number`; one without segments from `end` on.
    Strip operator()(std::int64_t number, std::int64_t end) const {
        if (number >= end) return {0, 0, 0, false, false};
        if (!halo) {
            const std::int64_t first = number * width_of_strip;
            return {first, 1, int(std::min(width_of_strip, pixels_ - first)), false, false};
        }
        const std::int64_t row = number % per_image_ * height_of_strip;
        const std::int64_t rows = std::min(height_of_strip, height_ - row);
        return {(number / per_image_ * height_ + row) * width_, int(rows), int(width_), row > 0, row + rows < height_};
    }

    int halo;
    std::int64_t strips, height_of_strip, width_of_strip;
    std::int64_t panel_floats, grad_floats, grad_input_floats;

private:
    std::int64_t pixels_, height_, width_, per_image_ = 1;
};

struct Work {
    Convolution of;
    Cut cut;
    int threads;
    std::vector<Scratch> scratch;
    float *forward_weight = nullptr, *backward_weight = nullptr, *bias = nullptr, *constant = nullptr, *slope = nullptr;
    std::int64_t weight_grad_floats = 0, padded_in, padded_out, bytes;

    Work(const ShoalNormConv& call, const Level& level, bool backward)
        : of{&call, call.kernel / 2, call.kernel * call.kernel, nullptr, nullptr, nullptr, nullptr, nullptr},
          cut(call, level, backward),
          threads(int(std::min<std::int64_t>(call.threads, cut.strips))),
          scratch(threads),
          padded_in(up(call.in_channels, level.columns)),
          padded_out(up(call.out_channels, level.columns)) {
        Workspace space(call.workspace);
        if (backward) {
            backward_weight = space.take<float>(of.taps * call.out_channels * padded_in);
            constant = space.take<float>(call.out_channels);
            slope = space.take<float>(call.out_channels);
            weight_grad_floats = call.out_channels * of.taps * padded_in;
        } else {
            forward_weight = space.take<float>(of.taps * call.in_channels * padded_out);
            bias = space.take<float>(padded_out);
        }
        for (Scratch& own : scratch) {
            own.input = space.take<float>(cut.panel_floats);
            if (backward) {
                own.grad = space.take<float>(cut.grad_floats);
                own.grad_input = space.take<float>(cut.grad_input_floats);
                own.weight_grad = space.take<float>(weight_grad_floats);
                own.sum = space.take<float>(padded_in);
                own.square = space.take<float>(padded_in);
            }
            take_results(space, call, padded_out, backward, own);
        }
        bytes = space.bytes;
    }
};

// Column tiles first to last of a weight of `depth` x `columns` x `taps`, as the tiles read it: see Convolution.
void pack(const Level& level, std::int64_t depth, std::int64_t columns, int taps, const float* weight,
          std::int64_t depth_stride, std::int64_t column_stride, std::int64_t tap_stride, std::int64_t tile, float* to) {
    const std::int64_t wide = level.columns, tiles = up(columns, wide) / wide;
    const std::int64_t filled = std::min(wide, columns - tile * wide);
    for (std::int64_t from = 0; from < depth; from += level.depth) {
        const std::int64_t count = std::min<std::int64_t>(level.depth, depth - from);
        float* block = to + taps * wide * (from * tiles + tile * count);
        for (int tap = 0; tap < taps; ++tap)
            // Sixteen at a time: a line of every column, read whole, however many columns share a cache set.
            for (std::int64_t k = 0; k < count; k += 16) {
                const std::int64_t some = std::min<std::int64_t>(16, count - k);
                const float* corner = weight + (from + k) * depth_stride + tile * wide * column_stride + tap * tap_stride;
                for (std::int64_t c = 0; c < wide; ++c)
                    for (std::int64_t i = 0; i < some; ++i)
                        block[i * wide + c] = c < filled ? corner[c * column_stride + i * depth_stride] : 0.0f;
                block += some * wide;
            }
    }
}

void forward(const ShoalNormConv& call, const Level& level) {
    Work work(call, level, false);
    const std::int64_t tiles = work.padded_out / level.columns;
    work.of.forward_weight = work.forward_weight;
    if (call.bias) {
        std::fill(std::copy_n(call.bias, call.out_channels, work.bias), work.bias + work.padded_out, 0.0f);
        work.of.bias = work.bias;
    }
    on_threads(work.threads, [&](int thread) {
        for (std::int64_t tile = thread; tile < tiles; tile += work.threads)
            pack(level, call.in_channels, call.out_channels, work.of.taps, call.weight, call.weight_in, call.weight_out,
                 call.weight_tap, tile, work.forward_weight);
    });
    on_threads(work.threads, [&](int thread) {
        Scratch& own = work.scratch[thread];
        std::fill_n(own.moments.mean, call.out_channels, 0.0);
        std::fill_n(own.moments.squares, call.out_channels, 0.0);
        on_share(work.cut.strips, thread, work.threads, [&](std::int64_t strip, std::int64_t last) {
            level.forward(work.of, work.cut(strip, last), work.cut(strip + 1, last), own);
        });
    });
    if (call.mean_y) finish_moments(work.scratch, call.out_channels, call.mean_y, call.variance_y);
}

void backward(const ShoalNormConv& call, const Level& level) {
    Work work(call, level, true);
    const std::int64_t tiles = work.padded_in / level.columns, in = call.in_channels;
    work.of.backward_weight = work.backward_weight;
    if (call.grad_mean_y) {
        line_of_statistics(call, work.constant, work.slope);
        work.of.grad_constant = work.constant;
        work.of.grad_slope = work.slope;
    }
    on_threads(work.threads, [&](int thread) {
        for (std::int64_t tile = thread; tile < tiles; tile += work.threads)
            pack(level, call.out_channels, in, work.of.taps, call.weight, call.weight_out, call.weight_in,
                 call.weight_tap, tile, work.backward_weight);
    });
    on_threads(work.threads, [&](int thread) {
        Scratch& own = work.scratch[thread];
        std::fill_n(own.weight_grad, work.weight_grad_floats, 0.0f);
        std::fill_n(own.total, in, 0.0);
        std::fill_n(own.centred, in, 0.0);
        on_share(work.cut.strips, thread, work.threads, [&](std::int64_t strip, std::int64_t last) {
            level.backward(work.of, work.cut(strip, last), work.cut(strip + 1, last), own);
        });
    });
    const std::int64_t rows = call.out_channels * work.of.taps;
    on_threads(work.threads, [&](int thread) {
        const std::int64_t last = rows * (thread + 1) / work.threads;
        for (std::int64_t row = rows * thread / work.threads; row < last; ++row) {
            const std::int64_t out = row / work.of.taps, tap = row % work.of.taps;
            for (std::int64_t tile = 0; tile < tiles; ++tile) {
                const std::int64_t at = ((tap * tiles + tile) * call.out_channels + out) * level.columns;
                const std::int64_t count = std::min<std::int64_t>(level.columns, in - tile * level.columns);
                float* to = call.grad_weight + row * in + tile * level.columns;
                std::copy_n(work.scratch[0].weight_grad + at, count, to);
                for (int part = 1; part < work.threads; ++part) {
                    const float* from = work.scratch[part].weight_grad + at;
                    for (std::int64_t c = 0; c < count; ++c) to[c] += from[c];
                }
            }
        }
    });
    finish_sums(work.scratch, in, call.grad_shift, call.grad_scale);
}

}  // namespace

const Level* level_of(std::int32_t level) {
    if (level == SHOAL_PORTABLE) return &portable_level();
#if defined(__x86_64__)
    const std::uint64_t has = shoal_cpu_features();
    constexpr std::uint64_t narrow = SHOAL_AVX2 | SHOAL_FMA;
    constexpr std::uint64_t wide = narrow | SHOAL_AVX512F | SHOAL_AVX512BW | SHOAL_AVX512VL;
    if ((level < 0 || level == SHOAL_AVX512_LEVEL) && (has & wide) == wide) return &avx512_level();
    if ((level < 0 || level == SHOAL_AVX2_LEVEL) && (has & narrow) == narrow) return &avx2_level();
#endif
    return level < 0 ? &portable_level() : nullptr;
}

}  // namespace shoal

SHOAL_API std::int32_t shoal_norm_conv_level() {
    for (const std::int32_t level : {SHOAL_AVX512_LEVEL, SHOAL_AVX2_LEVEL})
        if (shoal::level_of(level)) return level;
    return SHOAL_PORTABLE;
}

SHOAL_API std::int64_t shoal_norm_conv_workspace_bytes(const ShoalNormConv* call, std::int32_t backward) {
    const shoal::Level* level = shoal::level_of(call->level);
    if (!level) return 0;
    ShoalNormConv counted = *call;
    counted.workspace = nullptr;
    if (counted.winograd) return shoal::winograd_workspace_bytes(counted, *level, backward);
    return shoal::Work(counted, *level, backward).bytes;
}

SHOAL_API std::int32_t shoal_norm_conv_forward(const ShoalNormConv* call) {
    const shoal::Level* level = shoal::level_of(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    (call->winograd ? shoal::winograd_forward : shoal::forward)(*call, *level);
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_norm_conv_backward(const ShoalNormConv* call) {
    const shoal::Level* level = shoal::level_of(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    (call->winograd ? shoal::winograd_backward : shoal::backward)(*call, *level);
    return SHOAL_DONE;
}
