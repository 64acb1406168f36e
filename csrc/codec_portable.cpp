// The table codecs for every processor, a value at a time.
#include "codec_table.h"

namespace shoal {
namespace {

#include "codec_floats.h"

std::uint32_t largest(const float* x, std::int64_t count) {
    std::uint32_t found = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t bits = bits_of(x[i]) & 0x7fffffff;
        found = bits > found ? bits : found;
    }
    return found;
}

std::uint8_t sign_of(float x) { return static_cast<std::uint8_t>(bits_of(x) >> 24 & 0x80); }

float magnitude_of(float x) { return float_of(static_cast<std::int32_t>(bits_of(x) & 0x7fffffff)); }

int count_of(const Bounds& bounds, float y) {
    std::int32_t cell = static_cast<std::int32_t>(bits_of(y) >> kCellShift) - kFirstCell;
    cell = cell < 0 ? 0 : cell < kCells ? cell : kCells - 1;
    int index = bounds.start[cell];
    while (bounds.at[index + 1] <= y) ++index;
    return index;
}

void encode(const Table& table, const float* x, std::int64_t count, float scale, bool, const float*,
            std::uint8_t* codes) {
    for (std::int64_t i = 0; i < count; ++i)
        codes[i] = static_cast<std::uint8_t>(sign_of(x[i]) | count_of(table.middle, magnitude_of(x[i]) / scale));
}

void draw(const Table& table, const float* x, std::int64_t count, float scale, Draws draws, std::uint8_t* codes) {
    for (std::int64_t i = 0; i < count; ++i) {
        const float y = magnitude_of(x[i]) / scale;
        int index = count_of(table.value, y);
        if (index < kMagnitudes - 1) {
            const float below = table.magnitude[index], above = table.magnitude[index + 1];
            std::uint32_t h = (draws.first + static_cast<std::uint32_t>(i)) ^ draws.seed;
            h = (h ^ h >> 16) * 0x7feb352d;
            h = (h ^ h >> 15) * 0x846ca68b;
            h ^= h >> 16;
            index += static_cast<float>(h >> 8) * 0x1p-24f < (y - below) / (above - below);
        }
        codes[i] = static_cast<std::uint8_t>(sign_of(x[i]) | index);
    }
}

void signs(const float* x, std::int64_t count, std::uint8_t* codes) {
    for (std::int64_t i = 0; i < count; ++i) codes[i] = sign_of(x[i]);
}

void decode(const float* values, const std::uint8_t* codes, std::int64_t count, bool, float* out) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = values[codes[i]];
}

constexpr CodecLevel kLevel = {&largest, &encode, &draw, &signs, &decode};

}  // namespace

const CodecLevel& portable_codec() { return kLevel; }

}  // namespace shoal
