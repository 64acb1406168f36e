// shoal_note_closed, shoal_gate and shoal_norm_gradient against plain loops.
#include <algorithm>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "fuzz.h"
#include "report.h"
#include "shoal_native.h"
#include "stored.h"

namespace fuzz {
namespace {

template <typename Stored>
void expect(const Buffer<Stored>& result, std::int64_t element, Stored stored) {
    const float found = value_of(result.at(0, element)), wanted = value_of(stored);
    if (!(found == wanted)) fail("element %lld: %g, expected %g", static_cast<long long>(element), found, wanted);
}

void signs(Draw& draw, std::int64_t elements, std::int32_t threads, std::int32_t level) {
    const float above = draw.chance(50) ? 3.0f : std::nanf("");
    now_running("note_closed: %lld elements clipped at %g, %d threads, level %d", static_cast<long long>(elements), above,
                threads, level);
    Buffer<float> x(draw, "x", Use::kRead, elements);
    Buffer<std::uint8_t> codes(draw, "codes", Use::kWritten, elements);
    x.fill(draw, 4);
    for (std::int64_t i = 0; i < elements; ++i) {
        codes.at(0, i) = static_cast<std::uint8_t>(draw.from(0, 255));
        if (draw.chance(5)) x.at(0, i) = std::nanf("");
    }
    const std::vector<std::uint8_t> before(codes.data(), codes.data() + elements);
    guarded({&x, &codes}, [&] { shoal_note_closed(x.data(), elements, above, threads, level, codes.data()); });
    for (std::int64_t i = 0; i < elements; ++i) {
        const bool closed = x.at(0, i) <= 0 || x.at(0, i) >= above;
        const int wanted = (before[static_cast<std::size_t>(i)] & 127) | (closed ? 128 : 0);
        if (codes.at(0, i) != wanted) fail("code %lld: %d, expected %d", static_cast<long long>(i), codes.at(0, i), wanted);
    }
}

void gates(Draw& draw, std::int64_t elements, std::int32_t threads, std::int32_t level) {
    const std::int32_t above = draw.of({0, 1, 127});
    const bool alias = draw.chance(50);
    now_running("gate: %lld elements above %d, alias %d, %d threads, level %d", static_cast<long long>(elements), above,
                alias, threads, level);
    Buffer<float> grad(draw, "grad", alias ? Use::kWritten : Use::kRead, elements);
    Buffer<float> apart(draw, "result", Use::kWritten, alias ? 0 : elements);
    Buffer<std::uint8_t> open(draw, "gates", Use::kRead, elements);
    grad.fill(draw, 9);
    for (std::int64_t i = 0; i < elements; ++i) open.at(0, i) = static_cast<std::uint8_t>(draw.from(0, 255));
    const std::vector<float> before(grad.data(), grad.data() + elements);
    const Buffer<float>& result = alias ? grad : apart;
    guarded({&grad, &apart, &open},
            [&] { shoal_gate(grad.data(), open.data(), above, elements, threads, level, result.data()); });
    for (std::int64_t i = 0; i < elements; ++i)
        expect(result, i, open.at(0, i) > above ? before[static_cast<std::size_t>(i)] : 0.0f);
}

// Small whole numbers: every product is exact, so that it is one and the same fused or not.
template <typename Stored>
void norm(Draw& draw, ShoalNormGradient& call) {
    const bool alias = draw.chance(50);
    now_running("norm_gradient: %lld rows of %lld channels, bfloat16 %d, fused %d, alias %d, %d threads, level %d",
                static_cast<long long>(call.rows), static_cast<long long>(call.channels), call.bfloat16, call.fused,
                alias, call.threads, call.level);
    const std::int64_t elements = call.rows * call.channels;
    Buffer<Stored> grad(draw, "grad", alias ? Use::kWritten : Use::kRead, elements), x(draw, "x", Use::kRead, elements);
    Buffer<Stored> apart(draw, "result", Use::kWritten, alias ? 0 : elements);
    Buffer<float> mean(draw, "mean", Use::kRead, call.channels), invstd(draw, "invstd", Use::kRead, call.channels),
        weight(draw, "weight", Use::kRead, call.channels), of_weight(draw, "of_weight", Use::kRead, call.channels),
        of_bias(draw, "of_bias", Use::kRead, call.channels), scratch(draw, "scratch", Use::kWritten, 2 * call.channels);
    for (Buffer<float>* one : {&mean, &invstd, &weight, &of_weight, &of_bias}) one->fill(draw, 8);
    const float rows = static_cast<float>(call.rows);
    for (Buffer<float>* one : {&of_weight, &of_bias})
        for (std::int64_t c = 0; c < call.channels; ++c) one->at(0, c) *= rows;
    for (Buffer<Stored>* one : {&grad, &x})
        for (std::int64_t i = 0; i < elements; ++i) put(one->at(0, i), static_cast<float>(draw.from(-8, 8)));
    const std::vector<Stored> before(grad.data(), grad.data() + elements);
    call.grad = grad.data();
    call.x = x.data();
    call.mean = mean.data();
    call.invstd = invstd.data();
    call.weight = weight.data();
    call.of_weight = of_weight.data();
    call.of_bias = of_bias.data();
    call.scratch = scratch.data();
    const Buffer<Stored>& result = alias ? grad : apart;
    call.result = result.data();
    guarded({&grad, &x, &apart, &mean, &invstd, &weight, &of_weight, &of_bias, &scratch}, [&] { shoal_norm_gradient(&call); });
    for (std::int64_t i = 0; i < elements; ++i) {
        const std::int64_t c = i % call.channels;
        const float centred = value_of(x.at(0, i)) - mean.at(0, c);
        const float given = value_of(before[static_cast<std::size_t>(i)]);
        Stored wanted;
        const float mean_grad = of_bias.at(0, c) / rows, projection = of_weight.at(0, c) * invstd.at(0, c) / rows;
        put(wanted, (given - mean_grad - centred * projection) * invstd.at(0, c) * weight.at(0, c));
        expect(result, i, wanted);
    }
}

void norm(Draw& draw, std::int32_t threads, std::int32_t level) {
    ShoalNormGradient call{};
    call.channels = draw.size(draw.chance(20) ? 1600 : 300);
    call.rows = draw.size(std::clamp<std::int64_t>((1 << 16) / call.channels, 1, 2000));
    call.bfloat16 = draw.chance(50);
    call.fused = draw.chance(50);
    call.threads = threads;
    call.level = level;
    call.bfloat16 ? norm<std::uint16_t>(draw, call) : norm<float>(draw, call);
}

}  // namespace

void gradient_sweeps(Draw& draw) {
    const auto level = static_cast<std::int32_t>(draw.from(-1, shoal_norm_conv_level()));
    const std::int32_t threads = draw.of({1, 2, 3});  // also more than there are pieces
    const std::int64_t elements = draw.size(1 << 16);
    switch (draw.from(0, 2)) {
        case 0: return signs(draw, elements, threads, level);
        case 1: return gates(draw, elements, threads, level);
        default: return norm(draw, threads, level);
    }
}

}  // namespace fuzz
