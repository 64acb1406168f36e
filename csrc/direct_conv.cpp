// Convolutions in one to three dimensions without unfolding: rows of the input are copied, padded, into a panel that stays
// in L2. There every read of a filter is the same run of floats further on, so that vectors of results along rows
// need no gathering, whatever the kernel, stride and dilation are.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "direct_conv.h"
#include "norm_threads.h"
#include "stored_floats.h"

namespace shoal {
namespace {

constexpr std::int64_t kPanelFloats = 48 << 10, kOutFloats = 32 << 10, kSumFloats = 32 << 10;  // each a part of L2
constexpr std::int64_t kGradFloats = 16 << 10;  // a part of L1

const DirectLevel* direct_level_of(std::int32_t level) {
    const std::int32_t best = shoal_norm_conv_level();
    if (level > best) return nullptr;
#if defined(__x86_64__)
    const std::int32_t chosen = level < 0 ? best : level;
    if (chosen == SHOAL_AVX512_LEVEL) return &avx512_direct();
    if (chosen == SHOAL_AVX2_LEVEL) return &avx2_direct();
#endif
    return &portable_direct();
}

std::int64_t parts(std::int64_t value, std::int64_t most) { return (value + most - 1) / most; }

// `value` in as few parts of at most `most` as there can be, of nearly equal size.
std::int64_t even(std::int64_t value, std::int64_t most) {
    return parts(value, parts(value, std::max<std::int64_t>(1, std::min(value, most))));
}

// body(first, size) for each part.
template <typename Body>
void each_part(std::int64_t value, std::int64_t size, Body body) {
    for (std::int64_t first = 0; first < value; first += size) body(first, std::min(size, value - first));
}

// to[c] = row[(first + c * step) * ld], zero where that is outside of the row, or there is no row.
template <typename T>
void copy_row(float* to, std::int64_t count, const T* row, std::int64_t length, std::int64_t ld, std::int64_t first,
              std::int64_t step) {
    const std::int64_t begin = row ? std::clamp<std::int64_t>(first < 0 ? parts(-first, step) : 0, 0, count) : count;
    const std::int64_t last = length - first;  // where reads end
    const std::int64_t end = std::clamp<std::int64_t>(last > 0 ? parts(last, step) : 0, begin, count);
    std::memset(to, 0, std::size_t(begin) * sizeof(float));
    std::memset(to + end, 0, std::size_t(count - end) * sizeof(float));
    if (begin == end) return;
    const T* from = row + (first + begin * step) * ld;
    const std::int64_t jump = step * ld;
    to += begin;
    if (jump == 1) {
        if constexpr (sizeof(T) == sizeof(float))
            std::memcpy(to, from, std::size_t(end - begin) * sizeof(float));
        else
            for (std::int64_t c = 0; c < end - begin; ++c) to[c] = read(from + c);
    } else if (jump == 2) {
        for (std::int64_t c = 0; c < end - begin; ++c) to[c] = read(from + c * 2);
    } else {
        for (std::int64_t c = 0; c < end - begin; ++c) to[c] = read(from + c * jump);
    }
}

// Where the reads of a filter lie in a panel of (channel, depth of the filter, phases, rows, columns): along a stride,
// what is read at its own remainder, a phase, lies together.
struct Panel {
    const ShoalDirectConv* call;
    std::int64_t rows;  // of results
    std::int64_t row_phases, column_phases, more_rows, columns;

    Panel(const ShoalDirectConv& call) : call(&call), rows(0) {
        row_phases = phases(1);
        column_phases = phases(2);
        more_rows = beyond(1) / call.stride[1];
        columns = call.out_size[2] + beyond(2) / call.stride[2];
    }

    std::int64_t taps() const { return call->kernel[0] * call->kernel[1] * call->kernel[2]; }
    std::int64_t floats(std::int64_t of_rows) const {  // of a channel
        return call->kernel[0] * row_phases * column_phases * (of_rows + more_rows) * columns;
    }
    std::int64_t slack(int lanes) const { return beyond(2) / call->stride[2] + 2 * lanes; }

    void find_reads(std::int64_t channels, std::ptrdiff_t* reads) const {
        for (std::int64_t c = 0; c < channels; ++c)
            for (std::int64_t d = 0; d < call->kernel[0]; ++d)
                for (std::int64_t h = 0; h < call->kernel[1]; ++h)
                    for (std::int64_t w = 0; w < call->kernel[2]; ++w) {
                        const std::int64_t row = h * call->dilation[1], column = w * call->dilation[2];
                        const std::int64_t row_phase = row % call->stride[1], column_phase = column % call->stride[2];
                        const std::int64_t plane =
                            ((c * call->kernel[0] + d) * row_phases + row_phase) * column_phases + column_phase;
                        *reads++ = (plane * (rows + more_rows) + row / call->stride[1]) * columns + column / call->stride[2];
                    }
    }

    // What `row` and the following ones of a result read, in so many channels.
    template <typename T>
    void fill(std::int64_t image, std::int64_t first_channel, std::int64_t channels, std::int64_t depth, std::int64_t row,
              float* to) const {
        const ShoalDirectConv& c = *call;
        const T* x = static_cast<const T*>(c.x) + image * c.ld_x[0];
        for (std::int64_t channel = first_channel; channel < first_channel + channels; ++channel)
            for (std::int64_t d = 0; d < c.kernel[0]; ++d) {
                const std::int64_t z = depth * c.stride[0] + c.origin[0] + d * c.dilation[0];
                const T* plane = z >= 0 && z < c.in_size[0] ? x + channel * c.ld_x[1] + z * c.ld_x[2] : nullptr;
                for (std::int64_t row_phase = 0; row_phase < row_phases; ++row_phase)
                    for (std::int64_t column_phase = 0; column_phase < column_phases; ++column_phase)
                        for (std::int64_t r = 0; r < rows + more_rows; ++r, to += columns) {
                            const std::int64_t y = (row + r) * c.stride[1] + c.origin[1] + row_phase;
                            const T* from = plane && y >= 0 && y < c.in_size[1] ? plane + y * c.ld_x[3] : nullptr;
                            copy_row(to, columns, from, c.in_size[2], c.ld_x[4], c.origin[2] + column_phase, c.stride[2]);
                        }
            }
    }

    void fill_any(std::int64_t image, std::int64_t first_channel, std::int64_t channels, std::int64_t depth,
                  std::int64_t row, float* to) const {
        if (call->x_bfloat16)
            fill<std::uint16_t>(image, first_channel, channels, depth, row, to);
        else
            fill<float>(image, first_channel, channels, depth, row, to);
    }

private:
    std::int64_t beyond(int axis) const { return (call->kernel[axis] - 1) * call->dilation[axis]; }
    std::int64_t phases(int axis) const { return std::min(call->stride[axis], beyond(axis) + 1); }
};

// A result's rows from a row of sums each.
template <typename T>
void write_rows(const ShoalDirectConv& call, std::int64_t image, std::int64_t depth, std::int64_t row, std::int64_t rows,
                const float* sums, std::int64_t ld_sums, std::int64_t columns) {
    T* y = static_cast<T*>(call.y) + image * call.ld_y[0] + depth * call.ld_y[2] + row * call.ld_y[3];
    const std::int64_t width = call.out_size[2], ld = call.ld_y[4];
    for (std::int64_t c = 0; c < call.out_channels; ++c)
        for (std::int64_t r = 0; r < rows; ++r) {
            T* to = y + c * call.ld_y[1] + r * call.ld_y[3];
            const float* from = sums + c * ld_sums + r * columns;
            if (call.accumulate) {
                for (std::int64_t w = 0; w < width; ++w) write(to + w * ld, read(to + w * ld) + from[w]);
            } else if (ld == 1 && sizeof(T) == sizeof(float)) {
                std::memcpy(to, from, std::size_t(width) * sizeof(float));
            } else {
                for (std::int64_t w = 0; w < width; ++w) write(to + w * ld, from[w]);
            }
        }
}

template <typename T>
float weight_at(const ShoalDirectConv& call, std::int64_t out, std::int64_t in, std::int64_t tap) {
    const std::int64_t w = tap % call.kernel[2], h = tap / call.kernel[2] % call.kernel[1];
    const std::int64_t d = tap / call.kernel[2] / call.kernel[1];
    return read(static_cast<const T*>(call.weight) + out * call.ld_weight[0] + in * call.ld_weight[1] +
                d * call.ld_weight[2] + h * call.ld_weight[3] + w * call.ld_weight[4]);
}

template <typename T>
void pack_weight(const ShoalDirectConv& call, std::int64_t block, std::int64_t tile, float* to) {
    const std::int64_t taps = call.kernel[0] * call.kernel[1] * call.kernel[2];
    each_part(call.in_channels, block, [&](std::int64_t in, std::int64_t ins) {
        each_part(call.out_channels, tile, [&](std::int64_t out, std::int64_t outs) {
            for (std::int64_t i = in; i < in + ins; ++i)
                for (std::int64_t tap = 0; tap < taps; ++tap)
                    for (std::int64_t o = out; o < out + outs; ++o) *to++ = weight_at<T>(call, o, i, tap);
        });
    });
}

// How a call is cut into blocks, and its memory.
struct ForwardCut {
    Panel panel;
    std::int64_t ins, outs;  // channels of a panel, and of a tile
    std::int64_t places, panel_floats;
    std::int64_t jobs, bytes;
    float *weight, *bias;
    std::ptrdiff_t* reads;
    char* own;
    std::int64_t own_bytes;
    int threads;

    ForwardCut(const ShoalDirectConv& call, const DirectLevel& level, void* at) : panel(call) {
        panel.rows = even(call.out_size[1], kOutFloats / (call.out_channels * panel.columns));
        ins = even(call.in_channels, kPanelFloats / panel.floats(panel.rows));
        outs = even(call.out_channels, level.channels);
        places = up(panel.rows * panel.columns, level.lanes);
        panel_floats = ins * panel.floats(panel.rows) + panel.slack(level.lanes);
        jobs = call.images * call.out_size[0] * parts(call.out_size[1], panel.rows);
        threads = int(std::min<std::int64_t>(call.threads, jobs));
        Workspace space(at);
        weight = space.take<float>(call.in_channels * call.out_channels * panel.taps());
        bias = space.take<float>(call.out_channels);
        reads = space.take<std::ptrdiff_t>(ins * panel.taps());
        own = static_cast<char*>(at) + space.bytes;
        own_bytes = up(panel_floats * std::int64_t{sizeof(float)}, 64) +
                    up(call.out_channels * places * std::int64_t{sizeof(float)}, 64);
        bytes = space.bytes + threads * own_bytes;
    }
};

void forward(const ShoalDirectConv& call, const DirectLevel& level) {
    ForwardCut cut(call, level, call.workspace);
    const Panel& panel = cut.panel;
    (call.weight_bfloat16 ? pack_weight<std::uint16_t> : pack_weight<float>)(call, cut.ins, cut.outs, cut.weight);
    for (std::int64_t c = 0; c < call.out_channels; ++c)
        cut.bias[c] = !call.bias ? 0.0f
                      : call.weight_bfloat16 ? read(static_cast<const std::uint16_t*>(call.bias) + c)
                                             : static_cast<const float*>(call.bias)[c];
    panel.find_reads(cut.ins, cut.reads);
    on_threads(cut.threads, [&](int thread) {
        float* inputs = reinterpret_cast<float*>(cut.own + thread * cut.own_bytes);
        float* sums = inputs + up(cut.panel_floats, 16);
        std::memset(inputs, 0, std::size_t(cut.panel_floats) * sizeof(float));
        on_share(cut.jobs, thread, cut.threads, [&](std::int64_t job, std::int64_t) {
            const std::int64_t blocks = parts(call.out_size[1], panel.rows), row = job % blocks * panel.rows;
            const std::int64_t depth = job / blocks % call.out_size[0], image = job / blocks / call.out_size[0];
            const float* weight = cut.weight;
            each_part(call.in_channels, cut.ins, [&](std::int64_t in, std::int64_t ins) {
                panel.fill_any(image, in, ins, depth, row, inputs);
                const std::int64_t count = ins * panel.taps();
                each_part(call.out_channels, cut.outs, [&](std::int64_t out, std::int64_t outs) {
                    const std::int64_t vectors = cut.places / level.lanes, most = even(vectors, level.vectors[outs - 1]);
                    each_part(vectors, most, [&](std::int64_t first, std::int64_t some) {
                        const std::int64_t place = first * level.lanes;
                        level.tile[outs - 1][some - 1](inputs + place, cut.reads, count, weight,
                                                       in ? nullptr : cut.bias + out, sums + out * cut.places + place,
                                                       cut.places);
                    });
                    weight += count * outs;
                });
            });
            const std::int64_t rows = std::min(panel.rows, call.out_size[1] - row);
            (call.y_bfloat16 ? write_rows<std::uint16_t> : write_rows<float>)(call, image, depth, row, rows, sums,
                                                                              cut.places, panel.columns);
        });
    });
}

// A block of the weight's gradient, `outs` by `ins` channels, stays in L2 while all results go by, some rows at a time.
struct GradCut {
    Panel panel;
    std::int64_t tile_outs, outs, ins, in_blocks, out_blocks;
    std::int64_t places, panel_floats, grad_floats, sum_floats;
    std::int64_t bytes, own_bytes;
    std::ptrdiff_t* reads;
    char* own;
    int threads;

    GradCut(const ShoalDirectConv& call, const DirectLevel& level, void* at) : panel(call) {
        tile_outs = even(call.out_channels, level.grad_channels);
        const std::int64_t pairs = kSumFloats / (panel.taps() * level.lanes);
        // Every block copies its channels of both again: as much of the one as of the other is least.
        const double share = double(panel.floats(1) - panel.floats(0)) / double(panel.columns);
        outs = even(call.out_channels, std::int64_t(std::sqrt(double(pairs) * share)));
        outs = std::min(up(outs, tile_outs), up(call.out_channels, tile_outs));
        ins = even(call.in_channels, pairs / outs);
        in_blocks = parts(call.in_channels, ins);
        if (in_blocks * parts(call.out_channels, outs) < call.threads)  // work for everyone
            outs = up(even(call.out_channels, parts(call.out_channels * in_blocks, call.threads)), tile_outs);
        out_blocks = parts(call.out_channels, outs);
        panel.rows = even(call.out_size[1], kGradFloats / (tile_outs * panel.columns));
        places = (parts(panel.rows * panel.columns, level.lanes) | 1) * level.lanes;  // off the powers of two
        panel_floats = up(ins * panel.floats(panel.rows) + panel.slack(level.lanes), 16);
        grad_floats = up(outs * places, 16);
        sum_floats = outs * ins * panel.taps() * level.lanes;
        threads = int(std::min<std::int64_t>(call.threads, in_blocks * out_blocks));
        Workspace space(at);
        reads = space.take<std::ptrdiff_t>(ins * panel.taps());
        own = static_cast<char*>(at) + space.bytes;
        own_bytes = up((panel_floats + grad_floats + sum_floats) * std::int64_t{sizeof(float)}, 64);
        bytes = space.bytes + threads * own_bytes;
    }
};

// So many channels of a gradient, its rows as far apart as a panel's; zero in between, where a panel has no reads.
template <typename T>
void fill_grad(const ShoalDirectConv& call, const GradCut& cut, std::int64_t image, std::int64_t out, std::int64_t outs,
               std::int64_t depth, std::int64_t row, float* to) {
    const std::int64_t rows = std::min(cut.panel.rows, call.out_size[1] - row), columns = cut.panel.columns;
    const T* grad = static_cast<const T*>(call.grad_y) + image * call.ld_y[0] + depth * call.ld_y[2] + row * call.ld_y[3];
    for (std::int64_t c = 0; c < outs; ++c, to += cut.places) {
        for (std::int64_t r = 0; r < rows; ++r)
            copy_row(to + r * columns, columns, grad + (out + c) * call.ld_y[1] + r * call.ld_y[3], call.out_size[2],
                     call.ld_y[4], 0, 1);
        std::memset(to + rows * columns, 0, std::size_t(cut.places - rows * columns) * sizeof(float));
    }
}

template <typename T>
void write_grad(const ShoalDirectConv& call, const GradCut& cut, int lanes, std::int64_t in, std::int64_t ins,
                std::int64_t out, std::int64_t outs, const float* sums) {
    const std::int64_t taps = cut.panel.taps(), kernel_h = call.kernel[1], kernel_w = call.kernel[2];
    for (std::int64_t o = 0; o < outs; ++o)
        for (std::int64_t i = 0; i < ins; ++i)
            for (std::int64_t tap = 0; tap < taps; ++tap) {
                const float* own = sums + (o * cut.ins * taps + i * taps + tap) * lanes;
                float total = 0;
                for (int lane = 0; lane < lanes; ++lane) total += own[lane];
                const std::int64_t d = tap / kernel_w / kernel_h, h = tap / kernel_w % kernel_h, w = tap % kernel_w;
                T* to = static_cast<T*>(call.grad_weight) + (out + o) * call.ld_weight[0] + (in + i) * call.ld_weight[1] +
                        d * call.ld_weight[2] + h * call.ld_weight[3] + w * call.ld_weight[4];
                write(to, total);
            }
}

void weight_grad(const ShoalDirectConv& call, const DirectLevel& level) {
    GradCut cut(call, level, call.workspace);
    const Panel& panel = cut.panel;
    const std::int64_t taps = panel.taps();
    panel.find_reads(cut.ins, cut.reads);
    on_threads(cut.threads, [&](int thread) {
        float* inputs = reinterpret_cast<float*>(cut.own + thread * cut.own_bytes);
        float *grads = inputs + cut.panel_floats, *sums = grads + cut.grad_floats;
        std::memset(inputs, 0, std::size_t(cut.panel_floats) * sizeof(float));
        on_share(cut.in_blocks * cut.out_blocks, thread, cut.threads, [&](std::int64_t job, std::int64_t) {
            const std::int64_t in = job / cut.out_blocks * cut.ins, out = job % cut.out_blocks * cut.outs;
            const std::int64_t ins = std::min(cut.ins, call.in_channels - in);
            const std::int64_t outs = std::min(cut.outs, call.out_channels - out);
            const std::ptrdiff_t ld_sums = cut.ins * taps * level.lanes;
            std::memset(sums, 0, std::size_t(cut.sum_floats) * sizeof(float));
            for (std::int64_t image = 0; image < call.images; ++image)
                for (std::int64_t depth = 0; depth < call.out_size[0]; ++depth)
                    for (std::int64_t row = 0; row < call.out_size[1]; row += panel.rows) {
                        panel.fill_any(image, in, ins, depth, row, inputs);
                        (call.y_bfloat16 ? fill_grad<std::uint16_t> : fill_grad<float>)(call, cut, image, out, outs, depth,
                                                                                        row, grads);
                        each_part(outs, cut.tile_outs, [&](std::int64_t tile, std::int64_t rows) {
                            each_part(ins * taps, level.reads, [&](std::int64_t first, std::int64_t some) {
                                level.grad_tile[rows - 1][some - 1](
                                    grads + tile * cut.places, cut.places, inputs, cut.reads + first,
                                    cut.places / level.lanes, sums + tile * ld_sums + first * level.lanes, ld_sums);
                            });
                        });
                    }
            (call.weight_bfloat16 ? write_grad<std::uint16_t> : write_grad<float>)(call, cut, level.lanes, in, ins, out,
                                                                                   outs, sums);
        });
    });
}

}  // namespace
}  // namespace shoal

SHOAL_API std::int64_t shoal_direct_conv_workspace_bytes(const ShoalDirectConv* call, std::int32_t of_weight) {
    const shoal::DirectLevel* level = shoal::direct_level_of(call->level);
    if (!level) return 0;
    return of_weight ? shoal::GradCut(*call, *level, nullptr).bytes : shoal::ForwardCut(*call, *level, nullptr).bytes;
}

SHOAL_API std::int32_t shoal_direct_conv(const ShoalDirectConv* call) {
    const shoal::DirectLevel* level = shoal::direct_level_of(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    shoal::forward(*call, *level);
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_direct_conv_weight_grad(const ShoalDirectConv* call) {
    const shoal::DirectLevel* level = shoal::direct_level_of(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    shoal::weight_grad(*call, *level);
    return SHOAL_DONE;
}
