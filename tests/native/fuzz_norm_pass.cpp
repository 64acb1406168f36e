// shoal_statistics, shoal_norm_act and shoal_norm_act_backward against plain loops.
#include <algorithm>
#include <memory>

#include "exact_sum.h"
#include "fuzz.h"
#include "shoal_native.h"

namespace fuzz {
namespace {

struct Pass {
    std::int64_t rows, channels;
    Buffer<float> x, mean, scale, shift;
    ShoalNormPass call{};

    explicit Pass(Draw& draw)
        : rows(draw.size(1600)), channels(draw.size(std::clamp<std::int64_t>((1 << 17) / rows, 1, 700))),
          x(draw, "x", Use::kRead, rows, channels, row_stride(draw)), mean(draw, "mean", Use::kRead, channels),
          scale(draw, "scale", Use::kRead, channels), shift(draw, "shift", Use::kRead, channels) {
        x.fill(draw, 4);
        mean.fill(draw, 2);
        scale.fill(draw, 2);
        shift.fill(draw, 4);
        call.rows = rows;
        call.channels = channels;
        call.relu = draw.chance(70);
        call.threads = draw.of({1, 2, 3});  // also more than there are rows
        call.level = static_cast<std::int32_t>(draw.from(-1, shoal_norm_conv_level()));
        call.x = x.data();
        call.ld_x = x.row_stride();
    }

    std::int64_t row_stride(Draw& draw) const {
        return channels + (draw.chance(50) ? 0 : draw.of<std::int64_t>({1, 2, 3, 16, 31}));
    }

    void running(const char* what, bool residual = false, bool has_out = true, bool wants_x = true) const {
        now_running("%s: %lld rows of %lld channels, relu %d, residual %d, out %d, grad_x %d, %d threads, level %d",
                    what, static_cast<long long>(rows), static_cast<long long>(channels), call.relu, residual,
                    has_out, wants_x, call.threads, call.level);
    }

    double number(const Buffer<float>& of, std::int64_t row, std::int64_t c) const {
        return static_cast<double>(of.at(row, c));
    }
    double centred(std::int64_t row, std::int64_t c) const { return number(x, row, c) - number(mean, 0, c); }
    double normalised(std::int64_t row, std::int64_t c) const {
        return centred(row, c) * number(scale, 0, c) + number(shift, 0, c);
    }
};

void statistics(Draw& draw, Pass& pass) {
    pass.running("statistics");
    Buffer<float> mean(draw, "mean", Use::kWritten, pass.channels),
        variance(draw, "variance", Use::kWritten, pass.channels);
    ShoalNormPass& call = pass.call;
    call.statistic_mean = mean.data();
    call.statistic_variance = variance.data();
    const Memory workspace(static_cast<std::size_t>(shoal_norm_pass_workspace_bytes(&call)), 0, 64);
    call.workspace = workspace.at();
    guarded({&pass.x, &mean, &variance}, [&] {
        if (shoal_statistics(&call) != SHOAL_DONE) fail("the level is refused");
    });
    std::vector<Sum> values(static_cast<std::size_t>(pass.rows * pass.channels));
    for (std::int64_t row = 0; row < pass.rows; ++row)
        for (std::int64_t c = 0; c < pass.channels; ++c)
            values[static_cast<std::size_t>(row * pass.channels + c)].add(pass.number(pass.x, row, c));
    expect_statistics(mean, variance, values, pass.rows);
}

void activate(Draw& draw, Pass& pass) {
    ShoalNormPass& call = pass.call;
    const bool has_residual = draw.chance(50);
    pass.running("norm_act", has_residual);
    Buffer<float> residual(draw, "residual", Use::kRead, pass.rows, pass.channels, pass.row_stride(draw));
    Buffer<float> out(draw, "out", Use::kWritten, pass.rows, pass.channels, pass.row_stride(draw));
    residual.fill(draw, 6);
    std::vector<Sum> sums;
    for (std::int64_t row = 0; row < pass.rows; ++row)
        for (std::int64_t c = 0; c < pass.channels; ++c) {
            Sum sum;
            sum.add(pass.normalised(row, c));
            if (has_residual) sum.add(pass.number(residual, row, c));
            if (call.relu) sum.value = std::max(sum.value, 0.0);
            sums.push_back(sum);
        }
    call.mean = pass.mean.data();
    call.scale = pass.scale.data();
    call.shift = pass.shift.data();
    call.residual = has_residual ? residual.data() : nullptr;
    call.ld_residual = has_residual ? residual.row_stride() : 0;
    call.out = out.data();
    call.ld_out = out.row_stride();
    guarded({&pass.x, &pass.mean, &pass.scale, &pass.shift, &residual, &out}, [&] {
        if (shoal_norm_act(&call) != SHOAL_DONE) fail("the level is refused");
    });
    expect(out, sums);
}

void activate_backward(Draw& draw, Pass& pass) {
    ShoalNormPass& call = pass.call;
    const bool wants_residual = draw.chance(50), wants_x = draw.chance(80), has_out = draw.chance(50);
    pass.running("norm_act_backward", wants_residual, has_out, wants_x);
    Buffer<float> out(draw, "out", Use::kRead, pass.rows, pass.channels, pass.row_stride(draw));
    Buffer<float> grad(draw, "grad", Use::kRead, pass.rows, pass.channels, pass.row_stride(draw));
    Buffer<float> grad_x(draw, "grad_x", Use::kWritten, pass.rows, pass.channels, pass.row_stride(draw));
    Buffer<float> grad_residual(draw, "grad_residual", Use::kWritten, pass.rows, pass.channels, pass.row_stride(draw));
    Buffer<float> sum(draw, "sum", Use::kWritten, pass.channels);
    Buffer<float> sum_of_centred(draw, "sum_of_centred", Use::kWritten, pass.channels);
    out.fill(draw, 2);
    grad.fill(draw, 5);
    std::vector<Sum> of_x, of_residual, sums(static_cast<std::size_t>(pass.channels)), centred = sums;
    for (std::int64_t row = 0; row < pass.rows; ++row)
        for (std::int64_t c = 0; c < pass.channels; ++c) {
            const double result = has_out ? pass.number(out, row, c) : pass.normalised(row, c);
            const double da = !call.relu || result > 0 ? pass.number(grad, row, c) : 0.0;
            Sum alone, scaled;
            alone.add(da);
            scaled.add(da * pass.number(pass.scale, 0, c));
            of_residual.push_back(alone);
            of_x.push_back(scaled);
            sums[static_cast<std::size_t>(c)].add(da);
            centred[static_cast<std::size_t>(c)].add(da * pass.centred(row, c));
        }
    call.mean = pass.mean.data();
    call.scale = pass.scale.data();
    call.shift = has_out ? nullptr : pass.shift.data();
    call.out = has_out ? out.data() : nullptr;
    call.ld_out = has_out ? out.row_stride() : 0;
    call.grad = grad.data();
    call.ld_grad = grad.row_stride();
    call.grad_x = wants_x ? grad_x.data() : nullptr;
    call.ld_grad_x = wants_x ? grad_x.row_stride() : 0;
    call.grad_residual = wants_residual ? grad_residual.data() : nullptr;
    call.ld_grad_residual = wants_residual ? grad_residual.row_stride() : 0;
    call.sum = sum.data();
    call.sum_of_centred = sum_of_centred.data();
    const Memory workspace(static_cast<std::size_t>(shoal_norm_pass_workspace_bytes(&call)), 0, 64);
    call.workspace = workspace.at();
    guarded({&pass.x, &pass.mean, &pass.scale, &pass.shift, &out, &grad, &grad_x, &grad_residual, &sum,
             &sum_of_centred},
            [&] {
                if (shoal_norm_act_backward(&call) != SHOAL_DONE) fail("the level is refused");
            });
    if (wants_x) expect(grad_x, of_x);
    if (wants_residual) expect(grad_residual, of_residual);
    expect(sum, sums);
    expect(sum_of_centred, centred);
}

}  // namespace

void norm_pass(Draw& draw) {
    now_running("norm_pass: drawing");
    Pass pass(draw);
    const auto run = draw.of({&statistics, &activate, &activate_backward});
    run(draw, pass);
}

}  // namespace fuzz
