// Max pooling that notes in one byte where each window's maximum is, and its gradient, in one sweep each.
//
// A result reads its window. Results that lie side by side and read alike are computed together: the channels of a pixel
// in NHWC order, columns of a plane in NCHW order. In NHWC order a gradient reads the windows that its pixel is in; in
// NCHW order, where pixels side by side read differently, the gradient of each window is added where it belongs. Either
// way each element is one thread's, and its sum in the order of PyTorch's kernels.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "max_pool.h"
#include "shoal_native.h"

namespace shoal {
namespace {

using Call = ShoalMaxPool;

const PoolLevel* pool_level_of(std::int32_t level) {
    const std::int32_t best = shoal_norm_conv_level();
    const std::int32_t chosen = level < 0 ? best : level;
    if (chosen > best) return nullptr;
#if defined(__x86_64__)
    if (chosen == SHOAL_AVX512_LEVEL) return &avx512_pool();
    if (chosen == SHOAL_AVX2_LEVEL) return &avx2_pool();
#endif
    return &portable_pool();
}

struct Span {
    std::int64_t first, last;
};

// Places of window `number` along an axis that are in the input.
Span places_of(const Call& call, int axis, std::int64_t number) {
    const std::int64_t corner = number * call.stride[axis] - call.padding[axis];
    return {std::max<std::int64_t>(0, -corner), std::min(call.kernel[axis], call.in_size[axis] - corner)};
}

// Windows along an axis that pixel `number` is in.
Span windows_of(const Call& call, int axis, std::int64_t number) {
    const std::int64_t shifted = number + call.padding[axis], stride = call.stride[axis];
    const std::int64_t before = shifted - call.kernel[axis] + 1;  // a window that begins earlier ends before it
    return {before > 0 ? (before + stride - 1) / stride : 0, std::min(call.out_size[axis], shifted / stride + 1)};
}

// Rows of pixels that a row of windows reads, or rows of windows that a row of pixels is in: where each begins in its
// plane, and the byte of its first place.
struct Rows {
    std::int64_t at[kMostPoolPlaces], place[kMostPoolPlaces];
    int count = 0;

    void add(std::int64_t row, const std::int64_t* size, std::int64_t of_place) {
        at[count] = row * size[2];
        place[count++] = of_place;
    }
};

Rows rows_of_windows(const Call& call, std::int64_t d, std::int64_t h) {
    const Span deep = places_of(call, 0, d), down = places_of(call, 1, h);
    const std::int64_t deepest = d * call.stride[0] - call.padding[0], top = h * call.stride[1] - call.padding[1];
    Rows rows;
    for (std::int64_t k = deep.first; k < deep.last; ++k)
        for (std::int64_t i = down.first; i < down.last; ++i)
            rows.add((deepest + k) * call.in_size[1] + top + i, call.in_size,
                     k * call.place_step[0] + i * call.place_step[1]);
    return rows;
}

Rows rows_of_pixels(const Call& call, std::int64_t d, std::int64_t h) {
    const Span deep = windows_of(call, 0, d), down = windows_of(call, 1, h);
    Rows rows;
    for (std::int64_t k = deep.first; k < deep.last; ++k)
        for (std::int64_t i = down.first; i < down.last; ++i)
            rows.add(k * call.out_size[1] + i, call.out_size,
                     (d + call.padding[0] - k * call.stride[0]) * call.place_step[0] +
                         (h + call.padding[1] - i * call.stride[1]) * call.place_step[1]);
    return rows;
}

// What window `w` of the row reads.
int reads_of_window(const Call& call, const Rows& rows, std::int64_t w, PoolRead* reads) {
    const Span along = places_of(call, 2, w);
    const std::int64_t corner = w * call.stride[2] - call.padding[2], step = call.place_step[2];
    int count = 0;
    for (int row = 0; row < rows.count; ++row)
        for (std::int64_t j = along.first; j < along.last; ++j)
            reads[count++] = {(rows.at[row] + corner + j) * call.pixel,
                              static_cast<std::int32_t>(rows.place[row] + j * step)};
    return count;
}

// What pixel `w` of the row reads of the windows that it is in.
int reads_of_pixel(const Call& call, const Rows& rows, std::int64_t w, PoolRead* reads) {
    const Span along = windows_of(call, 2, w);
    const std::int64_t shifted = w + call.padding[2], step = call.place_step[2];
    int count = 0;
    for (int row = 0; row < rows.count; ++row)
        for (std::int64_t j = along.first; j < along.last; ++j)
            reads[count++] = {(rows.at[row] + j) * call.pixel,
                              static_cast<std::int32_t>(rows.place[row] + (shifted - j * call.stride[2]) * step)};
    return count;
}

// Which row of which plane is the `number`-th of rows of `size`.
struct Row {
    std::int64_t plane, d, h;
    Row(std::int64_t number, const std::int64_t* size)
        : plane(number / (size[0] * size[1])), d(number / size[1] % size[0]), h(number % size[1]) {}
};

std::int64_t plane_elements(const Call& call, const std::int64_t* size) {
    return size[0] * size[1] * size[2] * call.pixel;
}

// Where element `elements` of a tensor of the call's dtype lies.
template <typename Void>
Void* at(const Call& call, Void* tensor, std::int64_t elements) {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return static_cast<Byte*>(tensor) + elements * (call.bfloat16 ? 2 : 4);
}

void forward_row(const Call& call, const PoolLevel& level, std::int64_t number) {
    const Row row(number, call.out_size);
    const std::int64_t columns = call.out_size[2], stride = call.stride[2], padding = call.padding[2];
    // Windows of one plane that are in the input along the row read alike.
    const std::int64_t inside = (padding + stride - 1) / stride;
    const std::int64_t room = call.in_size[2] + padding - call.kernel[2];
    const std::int64_t outside = room < 0 ? 0 : std::min(columns, room / stride + 1);
    const Rows rows = rows_of_windows(call, row.d, row.h);
    PoolRead reads[kMostPoolPlaces];
    PoolWinners lanes{};
    lanes.x = at(call, call.x, row.plane * plane_elements(call, call.in_size));
    lanes.reads = reads;
    lanes.after_relu = call.after_relu != 0;
    for (std::int64_t w = 0, read = 1; w < columns; w += read) {
        const std::int64_t to = (number * columns + w) * call.pixel;
        lanes.count = reads_of_window(call, rows, w, reads);
        read = call.pixel == 1 && w >= inside && w < outside ? outside - w : 1;
        lanes.stride = call.pixel == 1 ? stride : 1;
        lanes.lanes = read * call.pixel;
        lanes.pooled = at(call, call.pooled, to);
        lanes.places = call.places + to;
        level.winners[call.bfloat16 != 0](lanes);
    }
}

void backward_row(const Call& call, const PoolLevel& level, std::int64_t number) {
    const Row row(number, call.in_size);
    const std::int64_t before = row.plane * plane_elements(call, call.out_size);
    const Rows rows = rows_of_pixels(call, row.d, row.h);
    PoolRead reads[kMostPoolPlaces];
    PoolGradients lanes{};
    lanes.grad = at(call, call.grad, before);
    lanes.places = call.places + before;
    lanes.lanes = call.pixel;
    lanes.reads = reads;
    for (std::int64_t w = 0; w < call.in_size[2]; ++w) {
        lanes.grad_x = at(call, call.grad_x, (number * call.in_size[2] + w) * call.pixel);
        lanes.count = reads_of_pixel(call, rows, w, reads);
        level.gradients[call.bfloat16 != 0](lanes);
    }
}

void add(float& sum, float value) { sum += value; }

void add(std::uint16_t& sum, std::uint16_t value) {
    const float exact = seen_as<float>(std::uint32_t{sum} << 16) + seen_as<float>(std::uint32_t{value} << 16);
    sum = static_cast<std::uint16_t>(rounded_to_half(seen_as<std::uint32_t>(exact)) >> 16);
}

// How far the place of each byte lies from its window's corner, along a plane.
struct Offsets {
    std::int64_t of[kNoPlace + 1] = {};

    explicit Offsets(const Call& call) {
        for (std::int64_t k = 0; k < call.kernel[0]; ++k)
            for (std::int64_t i = 0; i < call.kernel[1]; ++i)
                for (std::int64_t j = 0; j < call.kernel[2]; ++j)
                    of[k * call.place_step[0] + i * call.place_step[1] + j * call.place_step[2]] =
                        (k * call.in_size[1] + i) * call.in_size[2] + j;
    }
};

// A plane of single values: each gradient is added where its byte says.
template <typename Stored>
void backward_plane(const Call& call, const Offsets& offsets, std::int64_t number) {
    const std::int64_t elements = plane_elements(call, call.in_size);
    const std::int64_t before = number * plane_elements(call, call.out_size);
    const auto* grad = static_cast<const Stored*>(call.grad) + before;
    const std::uint8_t* places = call.places + before;
    auto* to = static_cast<Stored*>(call.grad_x) + number * elements;
    std::fill(to, to + elements, Stored{});
    for (std::int64_t d = 0; d < call.out_size[0]; ++d)
        for (std::int64_t h = 0; h < call.out_size[1]; ++h) {
            const std::int64_t deepest = d * call.stride[0] - call.padding[0];
            const std::int64_t row = deepest * call.in_size[1] + h * call.stride[1] - call.padding[1];
            std::int64_t corner = row * call.in_size[2] - call.padding[2];
            for (std::int64_t w = 0; w < call.out_size[2]; ++w, ++grad, ++places, corner += call.stride[2]) {
                // Whatever the byte, within the plane; what passes nowhere adds nothing.
                const std::int64_t place = std::clamp<std::int64_t>(corner + offsets.of[*places], 0, elements - 1);
                add(to[place], *places == kNoPlace ? Stored{} : *grad);
            }
        }
}

// body(number) for each of `count`.
template <typename Body>
void each(std::int64_t count, std::int32_t threads, Body body) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (std::int64_t number = 0; number < count; ++number) body(number);
}

}  // namespace
}  // namespace shoal

SHOAL_API std::int32_t shoal_max_pool(const ShoalMaxPool* call) {
    const shoal::PoolLevel* level = shoal::pool_level_of(call->level);
    if (level == nullptr) return SHOAL_NO_SUCH_LEVEL;
    shoal::each(call->planes * call->out_size[0] * call->out_size[1], call->threads,
                [&](std::int64_t number) { shoal::forward_row(*call, *level, number); });
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_max_pool_backward(const ShoalMaxPool* call) {
    const shoal::PoolLevel* level = shoal::pool_level_of(call->level);
    if (level == nullptr) return SHOAL_NO_SUCH_LEVEL;
    if (call->pixel > 1) {
        shoal::each(call->planes * call->in_size[0] * call->in_size[1], call->threads,
                    [&](std::int64_t number) { shoal::backward_row(*call, *level, number); });
    } else {
        const auto plane = call->bfloat16 ? &shoal::backward_plane<std::uint16_t> : &shoal::backward_plane<float>;
        const shoal::Offsets offsets(*call);
        shoal::each(call->planes, call->threads, [&](std::int64_t number) { plane(*call, offsets, number); });
    }
    return SHOAL_DONE;
}
