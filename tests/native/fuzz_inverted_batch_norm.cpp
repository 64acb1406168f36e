// shoal_inverted_batch_norm_forward, _sums and _result against plain loops.
#include <algorithm>
#include <cmath>

#include "exact_sum.h"
#include "fuzz.h"
#include "shoal_native.h"

namespace fuzz {
namespace {

struct Norm {
    std::int64_t images, channels, pixels;
    Buffer<float> shift, scale, mean, mean_grad_xhat;
    ShoalInvertedBatchNorm call{};

    explicit Norm(Draw& draw)
        : images(draw.from(1, 3)), channels(draw.size(draw.chance(20) ? 1600 : 300)),
          pixels(draw.size(std::clamp<std::int64_t>((1 << 16) / images / channels, 1, 2000))),
          shift(draw, "shift", Use::kRead, channels), scale(draw, "scale", Use::kRead, channels),
          mean(draw, "mean", Use::kRead, channels), mean_grad_xhat(draw, "mean_grad_xhat", Use::kRead, channels) {
        shift.fill(draw, 3);
        scale.fill(draw, 2);
        mean.fill(draw, 3);
        mean_grad_xhat.fill(draw, 2);
        call.images = images;
        call.channels = channels;
        call.pixels = pixels;
        call.channels_last = draw.chance(50);
        call.threads = draw.of({1, 2, 3});  // also more than there are pixels or channels
        call.level = static_cast<std::int32_t>(draw.from(-1, shoal_norm_conv_level()));
        call.activation = draw.of({SHOAL_LEAKY_RELU, SHOAL_ELU});
        call.slope = draw.of({1.0f, 0.5f, 0.25f});  // LeakyReLU's z, dz and their product are multiples of 1/4
        call.frozen = draw.chance(30);
    }

    void running(const char* what, bool alias) const {
        now_running(
            "inverted_batch_norm %s: %lld images of %lld pixels, %lld channels, channels_last %d, %s %g, "
            "frozen %d, alias %d, %d threads, level %d",
            what, static_cast<long long>(images), static_cast<long long>(pixels), static_cast<long long>(channels),
            call.channels_last, elu() ? "ELU" : "slope", slope(), call.frozen, alias, call.threads, call.level);
    }

    std::int64_t elements() const { return images * pixels * channels; }
    std::int64_t channel(std::int64_t element) const {
        return call.channels_last ? element % channels : element / pixels % channels;
    }
    double of(const Buffer<float>& vector, std::int64_t element) const {
        return static_cast<double>(vector.at(0, channel(element)));
    }

    bool elu() const { return call.activation == SHOAL_ELU; }
    double slope() const { return static_cast<double>(call.slope); }
    double activated(double z) const {
        if (z > 0) return z;
        return slope() * (elu() ? std::expm1(z) : z);
    }
    double undone(double y) const {
        if (y > 0) return y;
        return elu() ? std::log1p(std::fmax(y / slope(), -0x1.fffffep-1)) : y / slope();
    }
    double gradient(double y, double grad) const {
        if (y > 0) return grad;
        return grad * (elu() ? y + slope() : slope());
    }
    // ELU's own ulp counts as two roundings, and what becomes of it rounds again.
    double unit() const { return elu() ? 0 : 0.25; }
    std::int64_t roundings(std::int64_t of_elu) const { return elu() ? of_elu : 1; }
};

void forward(Draw& draw, Norm& norm) {
    const bool alias = draw.chance(50);
    norm.running("forward", alias);
    Buffer<float> x(draw, "y", alias ? Use::kWritten : Use::kRead, norm.elements());
    Buffer<float> result(draw, "result", Use::kWritten, norm.elements());
    const Buffer<float>& into = alias ? x : result;
    x.fill(draw, 4, norm.elu() ? 0.125f : 1.0f);
    std::vector<Sum> sums;
    for (std::int64_t i = 0; i < norm.elements(); ++i) {
        const double off = static_cast<double>(x.at(0, i)) - norm.of(norm.mean, i);
        const double z = off * norm.of(norm.scale, i) + norm.of(norm.shift, i);
        Sum sum;
        sum.add(norm.activated(z));
        sums.push_back(sum);
    }
    norm.call.y = x.data();
    norm.call.shift = norm.shift.data();
    norm.call.mean = norm.mean.data();
    norm.call.scale = norm.scale.data();
    norm.call.result = into.data();
    guarded({&x, &result, &norm.shift, &norm.mean, &norm.scale}, [&] { shoal_inverted_batch_norm_forward(&norm.call); });
    expect(into, sums, norm.unit());
}

void backward(Draw& draw, Norm& norm) {
    const bool alias = draw.chance(50);
    norm.running("backward", alias);
    Buffer<float> y(draw, "y", Use::kRead, norm.elements());
    Buffer<float> grad(draw, "grad", alias ? Use::kWritten : Use::kRead, norm.elements());
    Buffer<float> result(draw, "result", Use::kWritten, norm.elements());
    Buffer<double> sum(draw, "sum", Use::kWritten, norm.channels),
        centred(draw, "centred", Use::kWritten, norm.channels);
    Buffer<double> workspace(draw, "workspace", Use::kWritten, 2 * norm.call.threads * norm.channels);
    const Buffer<float>& into = alias ? grad : result;
    y.fill(draw, 4);
    grad.fill(draw, 4);
    if (norm.elu())  // nothing is below -alpha
        for (std::int64_t i = 0; i < norm.elements(); ++i)
            if (y.at(0, i) < 0) y.at(0, i) *= norm.call.slope / 4;
    std::vector<Sum> sums(static_cast<std::size_t>(norm.channels)), products = sums, results;
    for (std::int64_t i = 0; i < norm.elements(); ++i) {
        const double result_of_forward = static_cast<double>(y.at(0, i));
        const double dz = norm.gradient(result_of_forward, static_cast<double>(grad.at(0, i)));
        const double z = norm.undone(result_of_forward), shift = norm.of(norm.shift, i);
        const double off = z - shift, most = norm.elu() ? std::fabs(z) + std::fabs(shift) : std::fabs(off);
        sums[static_cast<std::size_t>(norm.channel(i))].add(dz);
        products[static_cast<std::size_t>(norm.channel(i))].add(dz * off, std::fabs(dz) * most, norm.roundings(5));
        const double scale = norm.of(norm.scale, i);
        Sum gradient;
        gradient.add(dz * scale);
        if (!norm.call.frozen) {
            const double mean_grad_xhat = norm.of(norm.mean_grad_xhat, i) * scale;
            gradient.add(-norm.of(norm.mean, i) * scale);
            gradient.add(-off * mean_grad_xhat, std::fabs(mean_grad_xhat) * most, norm.roundings(6));
        }
        results.push_back(gradient);
    }
    norm.call.y = y.data();
    norm.call.grad = grad.data();
    norm.call.shift = norm.shift.data();
    norm.call.sum = sum.data();
    norm.call.centred = centred.data();
    norm.call.workspace = workspace.data();
    guarded({&y, &grad, &norm.shift, &sum, &centred, &workspace}, [&] { shoal_inverted_batch_norm_sums(&norm.call); });
    expect(sum, sums, norm.elu() ? 0.0625 : 0.25);  // exact for both
    expect(centred, products, norm.unit());
    norm.call.mean = norm.call.frozen ? nullptr : norm.mean.data();
    norm.call.mean_grad_xhat = norm.call.frozen ? nullptr : norm.mean_grad_xhat.data();
    norm.call.scale = norm.scale.data();
    norm.call.result = into.data();
    guarded({&y, &grad, &result, &norm.shift, &norm.mean, &norm.mean_grad_xhat, &norm.scale},
            [&] { shoal_inverted_batch_norm_result(&norm.call); });
    expect(into, results, norm.unit());
}

}  // namespace

void inverted_batch_norm(Draw& draw) {
    now_running("inverted_batch_norm: drawing");
    Norm norm(draw);
    const auto run = draw.of({&forward, &backward});
    run(draw, norm);
}

}  // namespace fuzz
