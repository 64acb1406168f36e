// shoal_norm_statistics, _apply, _reduce and _apply_backward against plain loops.
#include <algorithm>
#include <cmath>

#include "exact_sum.h"
#include "fuzz.h"
#include "shoal_native.h"

namespace fuzz {
namespace {

struct Pass {
    std::int64_t images, channels, pixels;
    ShoalNormPass call{};
    std::int64_t outer, inner;  // rows and columns of a tensor as it lies: pixels of channels, or images of planes
    Buffer<float> mean, scale, shift, slope, constant;

    explicit Pass(Draw& draw)
        : images(draw.from(1, 3)), channels(draw.size(draw.chance(20) ? 1600 : 300)),
          pixels(draw.size(std::clamp<std::int64_t>((1 << 16) / images / channels, 1, 2000))),
          mean(draw, "mean", Use::kRead, channels), scale(draw, "scale", Use::kRead, channels),
          shift(draw, "shift", Use::kRead, channels), slope(draw, "slope", Use::kRead, channels),
          constant(draw, "constant", Use::kRead, channels) {
        for (Buffer<float>* vector : {&mean, &scale, &shift, &slope, &constant}) vector->fill(draw, 2);
        call.images = images;
        call.channels = channels;
        call.pixels = pixels;
        call.channels_last = draw.chance(50);
        outer = call.channels_last ? images * pixels : images;
        inner = call.channels_last ? channels : channels * pixels;
        call.activation = draw.of({SHOAL_IDENTITY, SHOAL_RELU, SHOAL_LEAKY_RELU, SHOAL_ELU});
        call.alpha = draw.of({1.0f, 0.5f, 0.25f});  // LeakyReLU's z, dz and their product are multiples of 1/4
        call.inverted = call.activation != SHOAL_RELU && draw.chance(50);
        call.threads = draw.of({1, 2, 3});  // also more than there are pixels or channels
        call.level = static_cast<std::int32_t>(draw.from(-1, shoal_norm_conv_level()));
        call.mean = call.inverted ? nullptr : mean.data();
        call.scale = scale.data();
        call.shift = shift.data();
    }

    Buffer<float> tensor(Draw& draw, const char* name, Use use) const {
        const std::int64_t gap = draw.chance(50) ? 0 : draw.of<std::int64_t>({1, 2, 3, 16, 31});
        return Buffer<float>(draw, name, use, outer, inner, inner + gap * (call.channels_last ? 1 : pixels));
    }

    void running(const char* what, bool residual = false, bool has_out = true, bool wants_x = true) const {
        now_running(
            "norm_pass %s: %lld images of %lld channels of %lld pixels, channels_last %d, activation %d of %g, inverted "
            "%d, residual %d, out %d, grad_x %d, %d threads, level %d",
            what, static_cast<long long>(images), static_cast<long long>(channels), static_cast<long long>(pixels),
            call.channels_last, call.activation, alpha(), call.inverted, residual, has_out, wants_x, call.threads, call.level);
    }

    std::int64_t channel(std::int64_t column) const { return call.channels_last ? column : column / pixels; }
    double of(const Buffer<float>& vector, std::int64_t column) const {
        return static_cast<double>(vector.at(0, channel(column)));
    }
    bool elu() const { return call.activation == SHOAL_ELU; }
    double alpha() const { return static_cast<double>(call.alpha); }
    double below_zero(double relu, double leaky, double of_elu, double other) const {
        return call.activation == SHOAL_RELU ? relu : call.activation == SHOAL_LEAKY_RELU ? leaky : elu() ? of_elu : other;
    }
    double activated(double z) const { return z > 0 ? z : below_zero(0, alpha() * z, alpha() * std::expm1(z), z); }
    double undone(double y) const {
        return y > 0 ? y : below_zero(0, y / alpha(), std::log1p(std::fmax(y / alpha(), -0x1.fffffep-1)), y);
    }
    double gradient(double z, double grad) const {
        return z > 0 ? grad : grad * below_zero(0, alpha(), alpha() * std::exp(z), 1);
    }
    double gradient_of_result(double y, double grad) const {
        return y > 0 ? grad : grad * below_zero(0, alpha(), y + alpha(), 1);
    }
    // ELU's own ulp counts as two roundings, and what becomes of it rounds again.
    double unit() const { return elu() ? 0 : 0.25; }
    std::int64_t roundings(std::int64_t of_elu) const { return elu() ? of_elu : 1; }

    // body(row, column)
    template <typename Body>
    void each(Body body) const {
        for (std::int64_t row = 0; row < outer; ++row)
            for (std::int64_t column = 0; column < inner; ++column) body(row, column);
    }
};

void set(const float*& at, std::int64_t& ld, const Buffer<float>& tensor, bool there = true) {
    at = there ? tensor.data() : nullptr;
    ld = there ? tensor.row_stride() : 0;
}

void set(float*& at, std::int64_t& ld, Buffer<float>& tensor, bool there = true) {
    at = there ? tensor.data() : nullptr;
    ld = there ? tensor.row_stride() : 0;
}

void statistics(Draw& draw, Pass& pass) {
    pass.running("statistics");
    Buffer<float> x = pass.tensor(draw, "x", Use::kRead);
    Buffer<float> mean(draw, "mean", Use::kWritten, pass.channels), variance(draw, "variance", Use::kWritten, pass.channels);
    x.fill(draw, 4);
    ShoalNormPass& call = pass.call;
    set(call.x, call.ld_x, x);
    call.statistic_mean = mean.data();
    call.statistic_variance = variance.data();
    const Memory workspace(static_cast<std::size_t>(shoal_norm_pass_workspace_bytes(&call)), 0, 64);
    call.workspace = workspace.at();
    guarded({&x, &mean, &variance}, [&] {
        if (shoal_norm_statistics(&call) != SHOAL_DONE) fail("the level is refused");
    });
    const std::int64_t count = pass.images * pass.pixels;
    std::vector<Sum> values(static_cast<std::size_t>(count * pass.channels));
    std::vector<std::int64_t> found(static_cast<std::size_t>(pass.channels), 0);
    pass.each([&](std::int64_t row, std::int64_t column) {
        const std::int64_t channel = pass.channel(column), number = found[static_cast<std::size_t>(channel)]++;
        values[static_cast<std::size_t>(number * pass.channels + channel)].add(static_cast<double>(x.at(row, column)));
    });
    expect_statistics(mean, variance, values, count);
}

void apply(Draw& draw, Pass& pass) {
    ShoalNormPass& call = pass.call;
    const bool has_residual = draw.chance(50), alias = draw.chance(50);
    pass.running("apply", has_residual);
    call.mean = pass.mean.data();
    Buffer<float> x = pass.tensor(draw, "x", alias ? Use::kWritten : Use::kRead), out = pass.tensor(draw, "out", Use::kWritten);
    Buffer<float> residual = pass.tensor(draw, "residual", Use::kRead);
    x.fill(draw, 4, pass.elu() ? 0.125f : 1.0f);
    residual.fill(draw, 6, pass.elu() ? 0.125f : 1.0f);
    Buffer<float>& into = alias ? x : out;
    std::vector<Sum> sums;
    pass.each([&](std::int64_t row, std::int64_t column) {
        const double centred = static_cast<double>(x.at(row, column)) - pass.of(pass.mean, column);
        double z = centred * pass.of(pass.scale, column) + pass.of(pass.shift, column);
        if (has_residual) z += static_cast<double>(residual.at(row, column));
        Sum sum;
        sum.add(pass.activated(z));
        sums.push_back(sum);
    });
    set(call.x, call.ld_x, x);
    set(call.residual, call.ld_residual, residual, has_residual);
    set(call.out, call.ld_out, into);
    guarded({&x, &out, &residual, &pass.mean, &pass.scale, &pass.shift}, [&] {
        if (shoal_norm_apply(&call) != SHOAL_DONE) fail("the level is refused");
    });
    expect(into, sums, pass.unit());
}

void backward(Draw& draw, Pass& pass) {
    ShoalNormPass& call = pass.call;
    const bool reduces = draw.chance(50), moves = !reduces && draw.chance(70), alias = draw.chance(50);
    const bool has_out = call.activation == SHOAL_RELU && draw.chance(50);
    const bool wants_residual = reduces && draw.chance(50), wants_x = !reduces || draw.chance(80);
    pass.running(reduces ? "reduce" : "apply_backward", wants_residual, has_out, wants_x);
    Buffer<float> x = pass.tensor(draw, "x", Use::kRead), out = pass.tensor(draw, "out", Use::kRead);
    Buffer<float> grad = pass.tensor(draw, "grad", alias ? Use::kWritten : Use::kRead);
    Buffer<float> grad_x = pass.tensor(draw, "grad_x", Use::kWritten);
    Buffer<float> grad_residual = pass.tensor(draw, "grad_residual", Use::kWritten);
    Buffer<double> sum(draw, "sum", Use::kWritten, pass.channels), centred(draw, "sum_of_centred", Use::kWritten, pass.channels);
    Buffer<float>& into = alias ? grad : grad_x;
    x.fill(draw, 4, pass.elu() && !call.inverted ? 0.125f : 1.0f);
    out.fill(draw, 2);
    grad.fill(draw, 4);
    if (pass.elu() && call.inverted)  // nothing is below -alpha
        pass.each([&](std::int64_t row, std::int64_t column) {
            if (x.at(row, column) < 0) x.at(row, column) *= call.alpha / 4;
        });
    std::vector<Sum> sums(static_cast<std::size_t>(pass.channels)), products = sums, of_x, of_residual;
    pass.each([&](std::int64_t row, std::int64_t column) {
        const double given = static_cast<double>(x.at(row, column)), shift = pass.of(pass.shift, column);
        const double scale = pass.of(pass.scale, column), coming = static_cast<double>(grad.at(row, column));
        double off = given - pass.of(pass.mean, column), da, most = std::fabs(off);
        if (call.inverted) {
            const double z = pass.undone(given);
            off = z - shift;
            da = pass.gradient_of_result(given, coming);
            most = pass.elu() ? std::fabs(z) + std::fabs(shift) : std::fabs(off);
        } else {
            da = pass.gradient(has_out ? static_cast<double>(out.at(row, column)) : off * scale + shift, coming);
        }
        // ELU's derivative is made of its value, of the size of alpha, which is at most 1.
        const double of_da = pass.elu() ? std::fabs(coming) : std::fabs(da);
        const std::size_t channel = static_cast<std::size_t>(pass.channel(column));
        sums[channel].add(da, of_da, pass.roundings(3));
        products[channel].add(da * off, of_da * most, pass.roundings(5));
        Sum alone, whole;
        alone.add(da, of_da, pass.roundings(3));
        whole.add(da * scale, of_da * std::fabs(scale), pass.roundings(4));
        if (moves) {
            const double slope = pass.of(pass.slope, column) * scale;
            whole.add(pass.of(pass.constant, column) * scale);
            whole.add(off * slope, std::fabs(slope) * most, pass.roundings(6));
        }
        of_residual.push_back(alone);
        of_x.push_back(whole);
    });
    set(call.x, call.ld_x, x);
    set(call.grad, call.ld_grad, grad);
    set(call.out, call.ld_out, out, has_out);
    set(call.grad_x, call.ld_grad_x, into, wants_x);
    set(call.grad_residual, call.ld_grad_residual, grad_residual, wants_residual);
    call.slope = moves ? pass.slope.data() : nullptr;
    call.constant = moves ? pass.constant.data() : nullptr;
    call.sum = sum.data();
    call.sum_of_centred = centred.data();
    const Memory workspace(static_cast<std::size_t>(shoal_norm_pass_workspace_bytes(&call)), 0, 64);
    call.workspace = workspace.at();
    guarded({&x, &out, &grad, &grad_x, &grad_residual, &sum, &centred, &pass.mean, &pass.scale, &pass.shift, &pass.slope,
             &pass.constant},
            [&] {
                if ((reduces ? shoal_norm_reduce : shoal_norm_apply_backward)(&call) != SHOAL_DONE)
                    fail("the level is refused");
            });
    if (wants_x) expect(into, of_x, pass.unit());
    if (wants_residual) expect(grad_residual, of_residual, pass.unit());
    if (!reduces) return;
    expect(sum, sums, pass.unit());
    expect(centred, products, pass.unit());
}

}  // namespace

void norm_pass(Draw& draw) {
    now_running("norm_pass: drawing");
    Pass pass(draw);
    const auto run = draw.of({&statistics, &apply, &backward, &backward});
    run(draw, pass);
}

}  // namespace fuzz
