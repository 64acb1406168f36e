// shoal_direct_conv and shoal_direct_conv_weight_grad against plain loops.
#include <algorithm>
#include <vector>

#include "exact_sum.h"
#include "fuzz.h"
#include "shoal_native.h"

namespace fuzz {
namespace {

// How far elements lie apart: dense, of whichever order of the axes.
void dense(Draw& draw, const std::vector<std::int64_t>& sizes, std::int64_t* strides) {
    std::vector<int> order{0, 1, 2, 3, 4};
    for (int axis = 4; axis > 0 && draw.chance(60); --axis)
        std::swap(order[static_cast<std::size_t>(axis)], order[static_cast<std::size_t>(draw.from(0, axis))]);
    std::int64_t step = 1;
    for (int place = 4; place >= 0; --place) {
        const auto axis = static_cast<std::size_t>(order[static_cast<std::size_t>(place)]);
        strides[axis] = step;
        step *= sizes[axis];
    }
}

std::int64_t at(const std::int64_t* strides, std::int64_t a, std::int64_t b, std::int64_t d, std::int64_t h, std::int64_t w) {
    return a * strides[0] + b * strides[1] + d * strides[2] + h * strides[3] + w * strides[4];
}

template <typename Body>
void each_read(const ShoalDirectConv& call, Body body) {
    for (std::int64_t n = 0; n < call.images; ++n)
        for (std::int64_t d = 0; d < call.out_size[0]; ++d)
            for (std::int64_t h = 0; h < call.out_size[1]; ++h)
                for (std::int64_t w = 0; w < call.out_size[2]; ++w)
                    for (std::int64_t i = 0; i < call.kernel[0]; ++i)
                        for (std::int64_t j = 0; j < call.kernel[1]; ++j)
                            for (std::int64_t k = 0; k < call.kernel[2]; ++k) {
                                const std::int64_t z = d * call.stride[0] + call.origin[0] + i * call.dilation[0];
                                const std::int64_t y = h * call.stride[1] + call.origin[1] + j * call.dilation[1];
                                const std::int64_t x = w * call.stride[2] + call.origin[2] + k * call.dilation[2];
                                if (z < 0 || z >= call.in_size[0] || y < 0 || y >= call.in_size[1] || x < 0 ||
                                    x >= call.in_size[2])
                                    continue;
                                body(n, d, h, w, i, j, k, z, y, x);
                            }
}

}  // namespace

void direct_conv(Draw& draw) {
    ShoalDirectConv call{};
    call.images = draw.from(1, 2);
    call.in_channels = draw.size(draw.chance(20) ? 60 : 12);
    call.out_channels = draw.size(call.in_channels > 12 ? 9 : 40);
    for (int axis = 0; axis < 3; ++axis) {
        call.kernel[axis] = draw.of<std::int64_t>({1, 2, 3, 5});
        call.stride[axis] = draw.of<std::int64_t>({1, 1, 2, 3});
        call.dilation[axis] = draw.of<std::int64_t>({1, 1, 2});
        call.in_size[axis] = draw.size(axis == 2 ? 40 : 7);
        call.out_size[axis] = draw.size(axis == 2 ? 40 : 6);
        call.origin[axis] = -draw.from(0, 5) + (draw.chance(10) ? 9 : 0);
    }
    call.threads = static_cast<std::int32_t>(draw.from(1, 4));
    call.level = static_cast<std::int32_t>(draw.from(-1, shoal_norm_conv_level()));
    const bool of_weight = draw.chance(50);
    call.accumulate = !of_weight && draw.chance(50);
    now_running(
        "direct_conv: of_weight %d, %lld x %lld to %lld channels, in %lld %lld %lld, out %lld %lld %lld, kernel %lld %lld "
        "%lld, %d threads, level %d",
        of_weight, static_cast<long long>(call.images), static_cast<long long>(call.in_channels),
        static_cast<long long>(call.out_channels), static_cast<long long>(call.in_size[0]),
        static_cast<long long>(call.in_size[1]), static_cast<long long>(call.in_size[2]),
        static_cast<long long>(call.out_size[0]), static_cast<long long>(call.out_size[1]),
        static_cast<long long>(call.out_size[2]), static_cast<long long>(call.kernel[0]),
        static_cast<long long>(call.kernel[1]), static_cast<long long>(call.kernel[2]), call.threads, call.level);
    dense(draw, {call.images, call.in_channels, call.in_size[0], call.in_size[1], call.in_size[2]}, call.ld_x);
    dense(draw, {call.images, call.out_channels, call.out_size[0], call.out_size[1], call.out_size[2]}, call.ld_y);
    dense(draw, {call.out_channels, call.in_channels, call.kernel[0], call.kernel[1], call.kernel[2]}, call.ld_weight);
    const auto count = [](std::int64_t a, std::int64_t b, const std::int64_t* sizes) {
        return a * b * sizes[0] * sizes[1] * sizes[2];
    };
    Buffer<float> x(draw, "x", Use::kRead, count(call.images, call.in_channels, call.in_size));
    Buffer<float> y(draw, "y", of_weight ? Use::kRead : Use::kWritten, count(call.images, call.out_channels, call.out_size));
    Buffer<float> weight(draw, "weight", of_weight ? Use::kWritten : Use::kRead,
                         count(call.out_channels, call.in_channels, call.kernel));
    Buffer<float> bias(draw, "bias", Use::kRead, call.out_channels);
    for (Buffer<float>* one : {&x, &y, &weight, &bias}) one->fill(draw, 4);
    const bool has_bias = !of_weight && draw.chance(50);
    std::vector<Sum> sums(static_cast<std::size_t>(of_weight ? weight.width() : y.width()));
    if (!of_weight)
        for (std::int64_t n = 0; n < call.images; ++n)
            for (std::int64_t o = 0; o < call.out_channels; ++o)
                for (std::int64_t d = 0; d < call.out_size[0]; ++d)
                    for (std::int64_t h = 0; h < call.out_size[1]; ++h)
                        for (std::int64_t w = 0; w < call.out_size[2]; ++w) {
                            const std::int64_t place = at(call.ld_y, n, o, d, h, w);
                            Sum& sum = sums[static_cast<std::size_t>(place)];
                            if (has_bias) sum.add(static_cast<double>(bias.at(0, o)));
                            if (call.accumulate) sum.add(static_cast<double>(y.at(0, place)));
                        }
    each_read(call, [&](auto n, auto d, auto h, auto w, auto i, auto j, auto k, auto z, auto v, auto u) {
        for (std::int64_t o = 0; o < call.out_channels; ++o)
            for (std::int64_t c = 0; c < call.in_channels; ++c) {
                const double read = static_cast<double>(x.at(0, at(call.ld_x, n, c, z, v, u)));
                const std::int64_t of = at(call.ld_weight, o, c, i, j, k), result = at(call.ld_y, n, o, d, h, w);
                if (of_weight)
                    sums[static_cast<std::size_t>(of)].add(read * static_cast<double>(y.at(0, result)));
                else
                    sums[static_cast<std::size_t>(result)].add(read * static_cast<double>(weight.at(0, of)));
            }
    });
    call.x = x.data();
    call.weight = of_weight ? nullptr : weight.data();
    call.bias = has_bias ? bias.data() : nullptr;
    call.y = of_weight ? nullptr : y.data();
    call.grad_y = of_weight ? y.data() : nullptr;
    call.grad_weight = of_weight ? weight.data() : nullptr;
    const Memory workspace(static_cast<std::size_t>(shoal_direct_conv_workspace_bytes(&call, of_weight)), 0, 64);
    call.workspace = workspace.at();
    guarded({&x, &y, &weight, &bias}, [&] {
        if ((of_weight ? shoal_direct_conv_weight_grad : shoal_direct_conv)(&call) != SHOAL_DONE) fail("the level is refused");
    });
    expect(of_weight ? weight : y, sums);
}

}  // namespace fuzz
