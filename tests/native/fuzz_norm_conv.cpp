// shoal_norm_conv_forward, _backward and shoal_norm_weight_grad against plain loops.
#include <algorithm>
#include <memory>

#include "exact_sum.h"
#include "fuzz.h"
#include "shoal_native.h"

namespace fuzz {
namespace {

constexpr std::int64_t kMostProducts = 1 << 20;  // of one sweep: some 10 ms under the sanitizers

struct Shape {
    std::int64_t images, height, width, in, out;
    int kernel;

    std::int64_t pixels() const { return images * height * width; }
    int taps() const { return kernel * kernel; }

    // The pixel that a tap of `pixel` reads, or -1 outside the image.
    std::int64_t neighbour(std::int64_t pixel, int tap) const {
        const std::int64_t row = pixel / width % height + tap / kernel - kernel / 2;
        const std::int64_t column = pixel % width + tap % kernel - kernel / 2;
        if (row < 0 || row >= height || column < 0 || column >= width) return -1;
        return (pixel / (height * width) * height + row) * width + column;
    }
};

Shape drawn_shape(Draw& draw) {
    Shape shape{};
    shape.kernel = draw.of({1, 3});
    const std::int64_t products = draw.chance(50) ? kMostProducts / 16 : kMostProducts;
    const std::int64_t several = draw.size(draw.chance(10) ? 600 : 300);  // of more blocks than one
    const std::int64_t few = draw.size(std::clamp<std::int64_t>(products / 8 / several / shape.taps(), 1, 300));
    shape.in = draw.chance(50) ? several : few;
    shape.out = shape.in == several ? few : several;
    if (shape.kernel == 3 && draw.chance(5)) {  // of so wide a weight that threads share the blocks
        shape.in = draw.from(170, 200);
        shape.out = draw.from(195, 210);
    }
    const std::int64_t pixels = std::clamp<std::int64_t>(products / (shape.in * shape.out * shape.taps()), 9, 4000);
    shape.width = draw.size(std::min<std::int64_t>(pixels, 70));
    shape.height = draw.size(std::min<std::int64_t>(pixels / shape.width, 70));
    shape.images = draw.from(1, std::clamp<std::int64_t>(pixels / shape.width / shape.height, 1, 4));
    return shape;
}

std::int64_t drawn_pitch(Draw& draw, std::int64_t channels) {
    return channels + (draw.chance(50) ? 0 : draw.of<std::int64_t>({1, 2, 3, 16, 31}));
}

// (out, tap, in) or (out, in, tap), rows perhaps apart: as a slice of a larger weight lies.
struct Weight {
    std::int64_t out_stride, in_stride, tap_stride;
    std::unique_ptr<Buffer<float>> buffer;

    Weight(Draw& draw, const Shape& shape) {
        const std::int64_t row = shape.in * shape.taps();
        out_stride = row + (draw.chance(70) ? 0 : draw.of<std::int64_t>({1, 9, 64}));
        const bool channels_last = draw.chance(50);
        in_stride = channels_last ? 1 : shape.taps();
        tap_stride = channels_last ? shape.in : 1;
        buffer = std::make_unique<Buffer<float>>(draw, "weight", Use::kRead, shape.out, row, out_stride);
        buffer->fill(draw, 3);
    }

    double operator()(std::int64_t out, std::int64_t in, int tap) const {
        return static_cast<double>(buffer->data()[out * out_stride + in * in_stride + tap * tap_stride]);
    }
};

// Winograd's algorithm halves weights twice, and adds up the neighbours that a result has in its square as well.
constexpr double kQuarters = 1.0 / 64;

void allow_for_squares(std::vector<Sum>& sums) {
    Sum most;
    for (const Sum& sum : sums) {
        most.size = std::max(most.size, sum.size);
        most.terms = std::max(most.terms, sum.terms);
    }
    for (Sum& sum : sums) sum = {sum.value, most.size, most.terms};
}

// What forward and backward read alike.
struct Operands {
    Shape shape;
    bool relu;
    Buffer<float> x, mean, scale, shift;
    Weight weight;
    std::vector<double> active;  // (pixels, in): what the convolution reads

    explicit Operands(Draw& draw)
        : shape(drawn_shape(draw)), relu(draw.chance(70)),
          x(draw, "x", Use::kRead, shape.pixels(), shape.in, drawn_pitch(draw, shape.in)),
          mean(draw, "mean", Use::kRead, shape.in), scale(draw, "scale", Use::kRead, shape.in),
          shift(draw, "shift", Use::kRead, shape.in), weight(draw, shape) {
        x.fill(draw, 4);
        mean.fill(draw, 2);
        scale.fill(draw, 2);
        shift.fill(draw, 4);
        active.reserve(static_cast<std::size_t>(shape.pixels() * shape.in));
        for (std::int64_t pixel = 0; pixel < shape.pixels(); ++pixel)
            for (std::int64_t c = 0; c < shape.in; ++c)
                active.push_back(relu ? std::max(normalised(pixel, c), 0.0) : normalised(pixel, c));
    }

    double centred(std::int64_t pixel, std::int64_t c) const {
        return static_cast<double>(x.at(pixel, c)) - static_cast<double>(mean.at(0, c));
    }
    double normalised(std::int64_t pixel, std::int64_t c) const {
        return centred(pixel, c) * static_cast<double>(scale.at(0, c)) + static_cast<double>(shift.at(0, c));
    }

    ShoalNormConv call(std::int32_t threads, std::int32_t level) const {
        ShoalNormConv call{};
        call.images = shape.images;
        call.height = shape.height;
        call.width = shape.width;
        call.in_channels = shape.in;
        call.out_channels = shape.out;
        call.kernel = shape.kernel;
        call.relu = relu;
        call.threads = threads;
        call.level = level;
        call.x = x.data();
        call.ld_x = x.row_stride();
        call.mean = mean.data();
        call.scale = scale.data();
        call.shift = shift.data();
        call.weight = weight.buffer->data();
        call.weight_out = weight.out_stride;
        call.weight_in = weight.in_stride;
        call.weight_tap = shape.kernel == 1 ? 0 : weight.tap_stride;
        return call;
    }
};

void forward(Draw& draw, Operands& given, ShoalNormConv call) {
    const Shape& shape = given.shape;
    const bool has_bias = draw.chance(50), statistics = draw.chance(70);
    now_running(
        "norm_conv forward: %d x %d, winograd %d, %lld images of %lld x %lld, %lld to %lld channels, relu %d, bias %d, "
        "statistics %d, %d threads, level %d",
        shape.kernel, shape.kernel, call.winograd, static_cast<long long>(shape.images),
        static_cast<long long>(shape.height), static_cast<long long>(shape.width), static_cast<long long>(shape.in),
        static_cast<long long>(shape.out), given.relu, has_bias, statistics, call.threads, call.level);
    Buffer<float> bias(draw, "bias", Use::kRead, shape.out);
    bias.fill(draw, 4);
    Buffer<float> y(draw, "y", Use::kWritten, shape.pixels(), shape.out, drawn_pitch(draw, shape.out));
    Buffer<float> mean_y(draw, "mean_y", Use::kWritten, shape.out);
    Buffer<float> variance_y(draw, "variance_y", Use::kWritten, shape.out);
    call.bias = has_bias ? bias.data() : nullptr;
    call.y = y.data();
    call.ld_y = y.row_stride();
    call.mean_y = statistics ? mean_y.data() : nullptr;
    call.variance_y = statistics ? variance_y.data() : nullptr;
    const Memory workspace(static_cast<std::size_t>(shoal_norm_conv_workspace_bytes(&call, 0)), 0, 64);
    call.workspace = workspace.at();
    guarded(
        {&given.x, &given.mean, &given.scale, &given.shift, given.weight.buffer.get(), &bias, &y, &mean_y, &variance_y},
        [&] {
            if (shoal_norm_conv_forward(&call) != SHOAL_DONE) fail("the level is refused");
        });

    std::vector<Sum> sums;
    for (std::int64_t pixel = 0; pixel < shape.pixels(); ++pixel)
        for (std::int64_t out = 0; out < shape.out; ++out) {
            Sum sum;
            if (has_bias) sum.add(static_cast<double>(bias.at(0, out)));
            for (int tap = 0; tap < shape.taps(); ++tap) {
                const std::int64_t from = shape.neighbour(pixel, tap);
                if (from < 0) continue;
                const double* active = given.active.data() + from * shape.in;
                for (std::int64_t in = 0; in < shape.in; ++in) sum.add(active[in] * given.weight(out, in, tap));
            }
            sums.push_back(sum);
        }
    if (call.winograd) allow_for_squares(sums);
    expect(y, sums, call.winograd ? kQuarters : 1);
    if (statistics) expect_statistics(mean_y, variance_y, sums, shape.pixels());
}

void backward(Draw& draw, Operands& given, ShoalNormConv call) {
    const Shape& shape = given.shape;
    const std::int64_t pixels = shape.pixels();
    const bool statistics = draw.chance(70), scaled = draw.chance(50);
    call.accumulate = draw.chance(50);
    now_running(
        "norm_conv backward: %d x %d, winograd %d, %lld images of %lld x %lld, %lld to %lld channels, relu %d, "
        "statistics %d, factor %d, accumulate %d, %d threads, level %d",
        shape.kernel, shape.kernel, call.winograd, static_cast<long long>(shape.images),
        static_cast<long long>(shape.height), static_cast<long long>(shape.width), static_cast<long long>(shape.in),
        static_cast<long long>(shape.out), given.relu, statistics, scaled, call.accumulate, call.threads, call.level);
    Buffer<float> grad_y(draw, "grad_y", Use::kRead, pixels, shape.out, drawn_pitch(draw, shape.out));
    Buffer<float> grad_factor(draw, "grad_factor", Use::kRead, shape.out);
    Buffer<float> y(draw, "y", Use::kRead, pixels, shape.out, drawn_pitch(draw, shape.out));
    Buffer<float> mean_y(draw, "mean_y", Use::kRead, shape.out);
    Buffer<float> grad_mean_y(draw, "grad_mean_y", Use::kRead, shape.out);
    Buffer<float> grad_variance_y(draw, "grad_variance_y", Use::kRead, shape.out);
    Buffer<float> grad_x(draw, "grad_x", Use::kWritten, pixels, shape.in, drawn_pitch(draw, shape.in));
    Buffer<float> grad_weight(draw, "grad_weight", Use::kWritten, shape.out, shape.taps() * shape.in,
                              shape.taps() * shape.in);
    Buffer<float> grad_scale(draw, "grad_scale", Use::kWritten, shape.in);
    Buffer<float> grad_shift(draw, "grad_shift", Use::kWritten, shape.in);
    grad_y.fill(draw, 4);
    grad_factor.fill(draw, 2);
    y.fill(draw, 4);
    mean_y.fill(draw, 2);
    // What each pixel gets of them is whole.
    grad_mean_y.fill(draw, 2, static_cast<float>(pixels));
    grad_variance_y.fill(draw, 2, static_cast<float>(pixels) / 2);
    if (call.accumulate) grad_x.fill(draw, 8);
    const auto added = [&](std::int64_t pixel, std::int64_t in) {
        return call.accumulate ? static_cast<double>(grad_x.at(pixel, in)) : 0.0;
    };
    std::vector<Sum> of_x(static_cast<std::size_t>(pixels * shape.in));
    for (std::int64_t pixel = 0; pixel < pixels; ++pixel)
        for (std::int64_t in = 0; in < shape.in; ++in)
            of_x[static_cast<std::size_t>(pixel * shape.in + in)].add(added(pixel, in));

    call.grad_y = grad_y.data();
    call.ld_grad_y = grad_y.row_stride();
    if (scaled) call.grad_factor = grad_factor.data();
    if (statistics) {
        call.y = y.data();
        call.ld_y = y.row_stride();
        call.mean_y = mean_y.data();
        call.grad_mean_y = grad_mean_y.data();
        call.grad_variance_y = grad_variance_y.data();
    }
    call.grad_x = grad_x.data();
    call.ld_grad_x = grad_x.row_stride();
    call.grad_weight = grad_weight.data();
    call.grad_scale = grad_scale.data();
    call.grad_shift = grad_shift.data();
    const Memory workspace(static_cast<std::size_t>(shoal_norm_conv_workspace_bytes(&call, 1)), 0, 64);
    call.workspace = workspace.at();
    guarded({&given.x, &given.mean, &given.scale, &given.shift, given.weight.buffer.get(), &grad_y, &grad_factor, &y, &mean_y,
             &grad_mean_y, &grad_variance_y, &grad_x, &grad_weight, &grad_scale, &grad_shift},
            [&] {
                if (shoal_norm_conv_backward(&call) != SHOAL_DONE) fail("the level is refused");
            });

    std::vector<double> grad;  // the whole gradient of y, (pixels, out)
    for (std::int64_t pixel = 0; pixel < pixels; ++pixel)
        for (std::int64_t out = 0; out < shape.out; ++out) {
            double whole = static_cast<double>(grad_y.at(pixel, out));
            if (scaled) whole *= static_cast<double>(grad_factor.at(0, out));
            if (statistics)
                whole += static_cast<double>(grad_mean_y.at(0, out)) / static_cast<double>(pixels) +
                         2 * static_cast<double>(grad_variance_y.at(0, out)) / static_cast<double>(pixels) *
                             (static_cast<double>(y.at(pixel, out)) - static_cast<double>(mean_y.at(0, out)));
            grad.push_back(whole);
        }
    std::vector<Sum> of_active(static_cast<std::size_t>(pixels * shape.in));
    std::vector<Sum> of_weight(static_cast<std::size_t>(shape.out * shape.taps() * shape.in));
    for (std::int64_t pixel = 0; pixel < pixels; ++pixel)
        for (int tap = 0; tap < shape.taps(); ++tap) {
            const std::int64_t from = shape.neighbour(pixel, tap);
            if (from < 0) continue;
            const double* active = given.active.data() + from * shape.in;
            Sum* to = of_active.data() + from * shape.in;
            for (std::int64_t out = 0; out < shape.out; ++out) {
                const double g = grad[static_cast<std::size_t>(pixel * shape.out + out)];
                Sum* of_tap = of_weight.data() + (out * shape.taps() + tap) * shape.in;
                for (std::int64_t in = 0; in < shape.in; ++in) {
                    to[in].add(g * given.weight(out, in, tap));
                    of_tap[in].add(g * active[in]);
                }
            }
        }
    std::vector<Sum> of_scale(static_cast<std::size_t>(shape.in)), of_shift(static_cast<std::size_t>(shape.in));
    for (std::int64_t pixel = 0; pixel < pixels; ++pixel)
        for (std::int64_t in = 0; in < shape.in; ++in) {
            const Sum& active = of_active[static_cast<std::size_t>(pixel * shape.in + in)];
            const bool through = !given.relu || given.normalised(pixel, in) > 0;
            const double da = through ? active.value : 0.0;
            Sum& to = of_x[static_cast<std::size_t>(pixel * shape.in + in)];
            to.add(da * static_cast<double>(given.scale.at(0, in)));
            // What went into da may be larger than what came of it.
            to.size = std::max(to.size, active.size * std::fabs(static_cast<double>(given.scale.at(0, in))));
            to.terms += active.terms;
            of_shift[static_cast<std::size_t>(in)].add(da);
            of_scale[static_cast<std::size_t>(in)].add(da * given.centred(pixel, in));
        }
    if (call.winograd)
        for (std::vector<Sum>* sums : {&of_x, &of_weight, &of_shift, &of_scale}) allow_for_squares(*sums);
    const double unit = call.winograd ? kQuarters : 1;
    expect(grad_x, of_x, unit);
    expect(grad_weight, of_weight, unit);
    expect(grad_shift, of_shift, unit);
    expect(grad_scale, of_scale, unit);
}

void weight_grad(Draw& draw, Operands& given, std::int32_t threads, std::int32_t level) {
    const Shape& shape = given.shape;
    const std::int64_t stride = draw.of({1, 1, 2, 3}), taps = shape.taps(), halo = shape.kernel / 2;
    const std::int64_t height = (shape.height - 1) / stride + 1, width = (shape.width - 1) / stride + 1;
    now_running(
        "norm_weight_grad: %d x %d, stride %lld, %lld images of %lld x %lld, %lld to %lld channels, relu %d, %d threads, "
        "level %d",
        shape.kernel, shape.kernel, static_cast<long long>(stride), static_cast<long long>(shape.images),
        static_cast<long long>(shape.height), static_cast<long long>(shape.width), static_cast<long long>(shape.in),
        static_cast<long long>(shape.out), given.relu, threads, level);
    const std::int64_t pixels = shape.images * height * width;
    Buffer<float> grad_y(draw, "grad_y", Use::kRead, pixels, shape.out, drawn_pitch(draw, shape.out));
    Buffer<float> grad_weight(draw, "grad_weight", Use::kWritten, shape.out, taps * shape.in, taps * shape.in);
    grad_y.fill(draw, 4);
    ShoalNormWeightGrad call{};
    call.images = shape.images;
    call.height = shape.height;
    call.width = shape.width;
    call.out_height = height;
    call.out_width = width;
    call.in_channels = shape.in;
    call.out_channels = shape.out;
    call.kernel = shape.kernel;
    call.stride = static_cast<std::int32_t>(stride);
    call.relu = given.relu;
    call.threads = threads;
    call.level = level;
    call.x = given.x.data();
    call.ld_x = given.x.row_stride();
    call.mean = given.mean.data();
    call.scale = given.scale.data();
    call.shift = given.shift.data();
    call.grad_y = grad_y.data();
    call.ld_grad_y = grad_y.row_stride();
    call.grad_weight = grad_weight.data();
    const Memory workspace(static_cast<std::size_t>(shoal_norm_weight_grad_workspace_bytes(&call)), 0, 64);
    call.workspace = workspace.at();
    guarded({&given.x, &given.mean, &given.scale, &given.shift, &grad_y, &grad_weight}, [&] {
        if (shoal_norm_weight_grad(&call) != SHOAL_DONE) fail("the level is refused");
    });
    std::vector<Sum> of_weight(static_cast<std::size_t>(shape.out * taps * shape.in));
    for (std::int64_t pixel = 0; pixel < pixels; ++pixel)
        for (std::int64_t tap = 0; tap < taps; ++tap) {
            const std::int64_t row = pixel / width % height * stride + tap / shape.kernel - halo;
            const std::int64_t column = pixel % width * stride + tap % shape.kernel - halo;
            if (row < 0 || row >= shape.height || column < 0 || column >= shape.width) continue;
            const std::int64_t from = (pixel / (height * width) * shape.height + row) * shape.width + column;
            for (std::int64_t out = 0; out < shape.out; ++out)
                for (std::int64_t in = 0; in < shape.in; ++in)
                    of_weight[static_cast<std::size_t>((out * taps + tap) * shape.in + in)].add(
                        static_cast<double>(grad_y.at(pixel, out)) *
                        given.active[static_cast<std::size_t>(from * shape.in + in)]);
        }
    expect(grad_weight, of_weight);
}

}  // namespace

void norm_conv(Draw& draw) {
    now_running("norm_conv: drawing");
    Operands given(draw);
    const std::int32_t threads = draw.of({1, 2, 3});
    const auto level = static_cast<std::int32_t>(draw.from(-1, shoal_norm_conv_level()));
    ShoalNormConv call = given.call(threads, level);
    call.winograd = given.shape.kernel == 3 && draw.chance(60);
    forward(draw, given, call);
    backward(draw, given, call);
    weight_grad(draw, given, threads, level);
}

}  // namespace fuzz
