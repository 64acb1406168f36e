// The codecs against plain loops, bit for bit.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "buffer.h"
#include "fuzz.h"
#include "shoal_native.h"

namespace fuzz {
namespace {

std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Where a float is wanted as bytes so that NaNs compare.
template <typename T>
void expect_bits(const Buffer<T>& found, const std::vector<T>& expected) {
    for (std::size_t i = 0; i < expected.size(); ++i)
        if (std::memcmp(&found.at(0, static_cast<std::int64_t>(i)), &expected[i], sizeof(T)) != 0)
            fail("%s[%zu] is %.9g, not %.9g", found.name(), i,
                 static_cast<double>(found.at(0, static_cast<std::int64_t>(i))), static_cast<double>(expected[i]));
}

float any_float(Draw& draw) {
    switch (draw.from(0, 9)) {
        case 0: return draw.of({0.0f, -0.0f, 1.0f, -1.0f, 0x1p-149f, 0x1p-126f, 3.4028235e38f});
        case 1: return std::ldexp(static_cast<float>(draw.from(-64, 64)), static_cast<int>(draw.from(-150, 120)));
        default: return static_cast<float>(draw.from(-(1 << 20), 1 << 20)) / static_cast<float>(draw.from(1, 1 << 20));
    }
}

void fill_floats(Draw& draw, const Buffer<float>& x) {
    const bool has_specials = draw.chance(20);
    for (std::int64_t i = 0; i < x.width(); ++i) {
        x.at(0, i) = any_float(draw);
        if (has_specials && draw.chance(1))
            x.at(0, i) = float_of(draw.of({0x7f800000u, 0xff800000u, 0x7fc00000u, 0xff800001u, 0x7fffffffu}));
    }
}

std::int64_t count(Draw& draw) { return draw.chance(4) ? 0 : draw.size(draw.chance(10) ? 40000 : 3000); }

struct Table {
    float magnitudes[128], thresholds[127];
    Memory derived;

    explicit Table(Draw& draw) : derived(static_cast<std::size_t>(shoal_codec_table_bytes()), 0, 8) {
        std::vector<double> values;
        const int kind = static_cast<int>(draw.from(0, 4));
        if (kind == 0) {  // even
            for (int i = 0; i < 128; ++i) values.push_back(i / 127.0);
        } else if (kind == 1) {  // a tree, halved somewhere
            const double low = 0.1, half = draw.of({0.45, 0.55, 0.3});
            values.push_back(0);
            for (int zeros = 0; zeros < 7; ++zeros) {
                const int leaves = 64 >> zeros;
                const double unit = std::pow(10.0, -zeros);
                if (leaves == 1) values.push_back(unit * (low + 1) / 2);
                for (int i = 0; i < leaves / 2; ++i) {
                    values.push_back(unit * (low + (half - low) * (2 * i + 1) / leaves));
                    values.push_back(unit * (half + (1 - half) * (2 * i + 1) / leaves));
                }
            }
        } else if (kind == 2) {  // decades of evenly spaced ones
            values.push_back(0);
            for (int decade = 0; static_cast<int>(values.size()) < 128; ++decade)
                for (int m = 15; m > 1 && static_cast<int>(values.size()) < 128; --m)
                    values.push_back(m / 15.0 * std::pow(10.0, -decade));
        } else if (kind == 3) {  // sixteen a decade, halved
            values.push_back(0);
            for (int decade = 0; decade < 8; ++decade)
                for (int i = 0; i < 8; ++i) {
                    const double unit = std::pow(10.0, -decade);
                    if (decade < 7 || i) values.push_back(unit * (0.1 + 0.35 * i / 8));
                    values.push_back(unit * (0.45 + 0.55 * i / 8));
                }
        } else {
            for (int i = 0; i < 127; ++i) values.push_back(static_cast<double>(draw.from(1, 1 << 20)) * 0x1p-20);
            values.push_back(0);
            std::sort(values.begin(), values.end());
            for (std::size_t i = 1; i < values.size(); ++i)  // all different
                if (values[i] <= values[i - 1]) values[i] = values[i - 1] + 0x1p-21;
            for (double& value : values) value /= values.back();
        }
        std::sort(values.begin(), values.end());
        std::copy(values.begin(), values.end(), magnitudes);
        for (int i = 0; i < 127; ++i)
            thresholds[i] = static_cast<float>((static_cast<double>(magnitudes[i]) + magnitudes[i + 1]) / 2);
        shoal_codec_table(magnitudes, thresholds, derived.at());
    }

    std::uint8_t index(float share) const {
        return static_cast<std::uint8_t>(std::upper_bound(thresholds, thresholds + 127, share) - thresholds);
    }

    std::uint8_t drawn(float share, std::uint32_t element, std::uint32_t seed) const {
        const int index = static_cast<int>(std::upper_bound(magnitudes + 1, magnitudes + 128, share) - magnitudes) - 1;
        if (index == 127) return 127;
        std::uint32_t h = element ^ seed;
        h = (h ^ h >> 16) * 0x7feb352d;
        h = (h ^ h >> 15) * 0x846ca68b;
        h ^= h >> 16;
        const float up = (share - magnitudes[index]) / (magnitudes[index + 1] - magnitudes[index]);
        return static_cast<std::uint8_t>(index + (static_cast<float>(h >> 8) * 0x1p-24f < up));
    }
};

std::int32_t any_level(Draw& draw) { return static_cast<std::int32_t>(draw.from(-1, shoal_norm_conv_level())); }

// The mean of x and of the same message, up to twice, has the codes of the sum.
void table_mean(Draw& draw, ShoalTableCodec call, const Buffer<float>& x, Buffer<float>& scales,
                Buffer<std::uint8_t>& codes, const std::vector<float>& decoded) {
    const std::int64_t messages = draw.from(0, 2), blocks = scales.width();
    const float divisor = static_cast<float>(draw.from(1, 5));
    now_running("table mean: %lld in blocks of %lld, %lld messages, over %g, %d threads, level %d",
                static_cast<long long>(call.elements), static_cast<long long>(call.block_elements),
                static_cast<long long>(messages), static_cast<double>(divisor), call.threads, call.level);
    Buffer<float> values(draw, "values", Use::kWritten, call.elements), sums(draw, "sums", Use::kRead, call.elements);
    Buffer<float> mean_scales(draw, "scales of the mean", Use::kWritten, blocks);
    Buffer<std::uint8_t> mean_codes(draw, "codes of the mean", Use::kWritten, call.elements);
    bool finite = true;
    for (std::int64_t i = 0; i < call.elements; ++i) {
        float sum = values.at(0, i) = x.at(0, i);
        for (std::int64_t message = 0; message < messages; ++message) sum += decoded[static_cast<std::size_t>(i)];
        sums.at(0, i) = sum / divisor;
        finite = finite && std::isfinite(sums.at(0, i));
    }
    const float* const all_scales[] = {scales.data(), scales.data()};
    const std::uint8_t* const all_codes[] = {codes.data(), codes.data()};
    call.x = call.out = values.data();
    call.scales = mean_scales.data();
    call.codes = mean_codes.data();
    const ShoalTableMean mean{call, messages, all_scales, all_codes, divisor};
    guarded({&scales, &codes, &values, &mean_scales, &mean_codes}, [&] {
        if (shoal_table_mean(&mean) != SHOAL_DONE) fail("the level is refused");
    });
    if (!finite) return;  // which bits a NaN has is not said
    const std::vector<float> found_scales(mean_scales.data(), mean_scales.data() + blocks);
    const std::vector<float> found(values.data(), values.data() + call.elements);
    const std::vector<std::uint8_t> found_codes(mean_codes.data(), mean_codes.data() + call.elements);
    call.x = sums.data();
    guarded({&sums, &mean_scales, &mean_codes}, [&] { shoal_table_encode(&call); });
    guarded({&mean_scales, &mean_codes, &values}, [&] { shoal_table_decode(&call); });
    expect_bits(mean_scales, found_scales);
    expect_bits(mean_codes, found_codes);
    expect_bits(values, found);
}

void table_codes(Draw& draw) {
    const Table table(draw);
    ShoalTableCodec call{};
    call.elements = count(draw);
    call.block_elements =
        std::min(std::max<std::int64_t>(call.elements, 1), draw.chance(20) ? call.elements + 1 : draw.size(5000));
    call.threads = draw.of({1, 2, 3});
    call.level = any_level(draw);
    call.has_scale = draw.chance(30);
    call.scale = std::fabs(any_float(draw));
    if (!(call.scale > 0)) call.scale = 1;
    call.draws = draw.chance(30);
    call.seed = static_cast<std::uint32_t>(draw.from(0, 0xffffffff));
    call.first_element = draw.of<std::int64_t>({0, 0xffffff00, 77});
    const std::int64_t blocks = (call.elements + call.block_elements - 1) / call.block_elements;
    now_running("table codes: %lld in blocks of %lld, scale %d (%g), draws %d, %d threads, level %d",
                static_cast<long long>(call.elements), static_cast<long long>(call.block_elements), call.has_scale,
                static_cast<double>(call.scale), call.draws, call.threads, call.level);
    Buffer<float> x(draw, "x", Use::kRead, call.elements), out(draw, "out", Use::kWritten, call.elements);
    Buffer<float> scales(draw, "scales", Use::kWritten, blocks);
    Buffer<std::uint8_t> codes(draw, "codes", Use::kWritten, call.elements);
    fill_floats(draw, x);
    std::vector<float> right_scales, right_values;
    std::vector<std::uint8_t> right_codes;
    for (std::int64_t begin = 0; begin < call.elements; begin += call.block_elements) {
        const std::int64_t end = std::min(begin + call.block_elements, call.elements);
        std::uint32_t most = 0;
        for (std::int64_t i = begin; i < end; ++i) most = std::max(most, bits_of(x.at(0, i)) & 0x7fffffff);
        float scale = call.has_scale ? call.scale : float_of(most);
        if (most >= 0x7f800000) scale = float_of(0x7fc00000);
        right_scales.push_back(scale);
        for (std::int64_t i = begin; i < end; ++i) {
            const bool negative = bits_of(x.at(0, i)) >> 31;
            const float share = std::fabs(x.at(0, i)) / scale;
            std::uint8_t index = 0;
            if (scale > 0)
                index = call.draws
                            ? table.drawn(share, static_cast<std::uint32_t>(call.first_element + i), call.seed)
                            : table.index(share);
            right_codes.push_back(static_cast<std::uint8_t>(index | (negative ? 0x80 : 0)));
            const float value = table.magnitudes[index] * scale;
            right_values.push_back(scale == scale ? negative ? -value : value : float_of(0x7fc00000));
        }
    }
    call.table = table.derived.at();
    call.x = x.data();
    call.scales = scales.data();
    call.codes = codes.data();
    guarded({&x, &scales, &codes}, [&] {
        if (shoal_table_encode(&call) != SHOAL_DONE) fail("the level is refused");
    });
    expect_bits(scales, right_scales);
    expect_bits(codes, right_codes);
    call.x = nullptr;
    call.out = out.data();
    guarded({&scales, &codes, &out}, [&] {
        if (shoal_table_decode(&call) != SHOAL_DONE) fail("the level is refused");
    });
    expect_bits(out, right_values);
    if (!call.draws) table_mean(draw, call, x, scales, codes, right_values);
}

void truncation(Draw& draw) {
    ShoalTruncation call{};
    call.elements = count(draw);
    call.width = static_cast<std::int32_t>(draw.from(1, 3));
    call.nearest = draw.chance(50);
    call.threads = draw.of({1, 2, 3});
    call.level = any_level(draw);
    now_running("truncation: %lld to %d bytes, nearest %d, %d threads, level %d", static_cast<long long>(call.elements),
                call.width, call.nearest, call.threads, call.level);
    Buffer<float> x(draw, "values", Use::kRead, call.elements), out(draw, "out", Use::kWritten, call.elements);
    Buffer<std::uint8_t> packed(draw, "packed", Use::kWritten, call.width * call.elements);
    const bool any_bits = draw.chance(50);
    fill_floats(draw, x);
    std::vector<std::uint8_t> right;
    std::vector<float> values;
    const int dropped = 32 - 8 * call.width;
    for (std::int64_t i = 0; i < call.elements; ++i) {
        if (any_bits) x.at(0, i) = float_of(static_cast<std::uint32_t>(draw.from(0, 0xffffffff)));
        const std::uint32_t bits = bits_of(x.at(0, i)), magnitude = bits & 0x7fffffff;
        std::uint64_t code = magnitude >> dropped;
        if (magnitude > 0x7f800000) {
            code = (magnitude | 0x400000) >> dropped;
        } else if (call.nearest && magnitude < 0x7f800000) {
            // By the distances to this code and the next, exact in doubles. In one byte codes are even exponents.
            const auto value = [&](std::uint64_t of) {
                const double exponent = static_cast<double>(of << dropped >> 23);
                if (call.width == 1) return of ? std::ldexp(1.0, static_cast<int>(exponent) - 127) : 0.0;
                if (of << dropped == 0x7f800000) return 0x1p128;
                return static_cast<double>(float_of(static_cast<std::uint32_t>(of << dropped)));
            };
            const double here = static_cast<double>(float_of(magnitude)) - value(code);
            const double next = value(code + 1) - static_cast<double>(float_of(magnitude));
            if (next < here || (next == here && (code & 1))) ++code;
        }
        code |= static_cast<std::uint64_t>(bits >> 31) << (8 * call.width - 1);
        for (int byte = 0; byte < call.width; ++byte) right.push_back(static_cast<std::uint8_t>(code >> (8 * byte)));
        std::uint32_t value = static_cast<std::uint32_t>(code << dropped);
        if (call.width == 1 && (value & 0x7fffffff) == 0x7f000000) value |= 0x7fc00000;
        values.push_back(float_of(value));
    }
    call.values = x.data();
    call.packed = packed.data();
    guarded({&x, &packed}, [&] {
        if (shoal_truncation_pack(&call) != SHOAL_DONE) fail("the level is refused");
    });
    expect_bits(packed, right);
    call.values = out.data();
    guarded({&packed, &out}, [&] {
        if (shoal_truncation_unpack(&call) != SHOAL_DONE) fail("the level is refused");
    });
    expect_bits(out, values);
}

double lanes_sum(const Buffer<float>& x, std::int64_t begin, std::int64_t end, bool negatives) {
    double sum = 0;
    for (std::int64_t run = begin; run < end; run += 4096) {
        double lanes[64] = {};
        for (std::int64_t i = run; i < std::min(run + 4096, end); ++i)
            if ((x.at(0, i) < 0) == negatives) lanes[(i - run) % 64] += static_cast<double>(x.at(0, i));
        for (int half = 32; half; half /= 2)
            for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
        sum += lanes[0];
    }
    return sum;
}

void bits(Draw& draw) {
    ShoalBits call{};
    call.elements = count(draw);
    call.block_elements = draw.chance(20) ? std::max<std::int64_t>(call.elements, 1) : 8 * draw.size(700);
    call.threads = draw.of({1, 2, 3});
    call.level = any_level(draw);
    now_running("bits: %lld in blocks of %lld, %d threads, level %d", static_cast<long long>(call.elements),
                static_cast<long long>(call.block_elements), call.threads, call.level);
    const std::int64_t blocks = (call.elements + call.block_elements - 1) / call.block_elements;
    Buffer<float> x(draw, "values", Use::kRead, call.elements), out(draw, "out", Use::kWritten, call.elements);
    Buffer<float> means(draw, "means", Use::kWritten, 2 * blocks);
    Buffer<std::uint8_t> signs(draw, "bits", Use::kWritten, (call.elements + 7) / 8);
    Buffer<std::uint8_t> mask(draw, "mask", Use::kWritten, (call.elements + 7) / 8);
    Buffer<std::uint8_t> flags(draw, "flags", Use::kWritten, call.elements);
    fill_floats(draw, x);
    std::vector<float> right_means, right_values;
    std::vector<std::uint8_t> right_signs(static_cast<std::size_t>((call.elements + 7) / 8)), right_mask = right_signs;
    std::vector<std::uint8_t> right_flags;
    for (std::int64_t begin = 0; begin < call.elements; begin += call.block_elements) {
        const std::int64_t end = std::min(begin + call.block_elements, call.elements);
        std::int64_t negatives = 0;
        bool has_nan = false;
        for (std::int64_t i = begin; i < end; ++i) {
            const float value = x.at(0, i);
            negatives += value < 0;
            has_nan |= value != value;
            right_signs[static_cast<std::size_t>(i / 8)] |= static_cast<std::uint8_t>((value < 0) << (i % 8));
            right_mask[static_cast<std::size_t>(i / 8)] |= static_cast<std::uint8_t>((value > 0) << (i % 8));
            right_flags.push_back(value > 0);
        }
        for (const bool side : {false, true}) {
            const std::int64_t members = side ? negatives : end - begin - negatives;
            const double sum = lanes_sum(x, begin, end, side);
            const float mean = members ? static_cast<float>(sum / static_cast<double>(members)) : 0.0f;
            right_means.push_back(has_nan ? float_of(0x7fc00000) : mean);
        }
        for (std::int64_t i = begin; i < end; ++i)
            right_values.push_back(right_means[right_means.size() - (x.at(0, i) < 0 ? 1 : 2)]);
    }
    call.values = x.data();
    call.means = means.data();
    call.bits = signs.data();
    const auto run = [](std::int32_t outcome) {
        if (outcome != SHOAL_DONE) fail("the level is refused");
    };
    guarded({&x, &means, &signs}, [&] { run(shoal_one_bit_encode(&call)); });
    expect_bits(means, right_means);
    expect_bits(signs, right_signs);
    call.values = out.data();
    guarded({&means, &signs, &out}, [&] { run(shoal_one_bit_decode(&call)); });
    expect_bits(out, right_values);
    call.values = x.data();
    call.bits = mask.data();
    guarded({&x, &mask}, [&] { run(shoal_sign_mask_encode(&call)); });
    expect_bits(mask, right_mask);
    call.flags = flags.data();
    guarded({&mask, &flags}, [&] { run(shoal_sign_mask_decode(&call)); });
    expect_bits(flags, right_flags);
}

}  // namespace

void codec(Draw& draw) {
    now_running("codec: drawing");
    const auto run = draw.of({&table_codes, &table_codes, &truncation, &bits});
    run(draw);
}

}  // namespace fuzz
