// What the drivers of the table codecs share with the code of each instruction set.
#pragma once

#include <cstdint>

#include "shoal_native.h"

namespace shoal {

constexpr std::int64_t kStreamed = std::int64_t{4} << 20;  // elements that the caches do not hold anyway
constexpr int kMagnitudes = 128;
constexpr int kPieces = 8;  // of a table that is looked up in one register of AVX2

// Shares of the scale are sorted into cells by their exponent and first bits: 32 cells between two powers of two, the
// first for all below 2^-26, the last for 1 and more.
constexpr int kCellShift = 18;
constexpr std::int32_t kFirstCell = (127 - 26) << 5;
constexpr int kCells = 26 * 32 + 1;

// Ascending bounds and, for each cell, how many of them are at most its least share; `steps` more at most lie inside.
struct Bounds {
    float at[kMagnitudes + 1];  // at[i] for i = 1 ... 127; at[128] is NaN
    std::int32_t start[kCells];
    std::int32_t steps;
};

enum class Shape : std::int32_t {
    kAny,    // bounds alone
    kLine,  // evenly spaced
    kLines,  // evenly spaced within each of up to nine pieces
    kHalves,  // piece n > 0 has the 16 codes from 16 * n on, halved: each half is evenly spaced
    kTree,   // piece n > 0 has the 2^(n - 1) codes from there on, halved: each half is evenly spaced
};

// Everything derived from the magnitudes of a table. A share y belongs to piece n where joins[n - 1] <= y < joins[n].
struct Table {
    float magnitude[kMagnitudes];
    Bounds middle, value;  // the thresholds; the magnitudes themselves
    Shape shape;
    // The piece, or the one before it, from the upper half of a share's bits: those of 1 less `key_span`, times
    // `key_factor`, over 2^16.
    std::int32_t key_span, key_factor;
    float joins[kPieces];
    // kLines: 128 + index + fraction = slope * y + offset, at most limit; piece 8 is the one above `top_join`.
    double slope[kPieces + 1], offset[kPieces + 1];
    float limit[kPieces], top_join;  // one piece alone, and the top one, need no limit
    // kHalves: the least of low = slope * y + offset, high_slope * low + high_of[n] and limit.
    float high_of[kPieces];
    // kTree: 1 + place in the piece = least of low = slope * y + low_offset, ratio * low + middle[n] and
    // high_slope * low + high_offset.
    float low_offset, high_slope, high_offset, across_slope, across_offset[kPieces];
};

// A group of values whose index may be the next one, if seen exactly, has a fraction (of 2^16) less than this: what is
// added before comparing, and twice the greatest error.
constexpr int kNear = 7, kNearHalves = 11;
constexpr double kLineBias = 3.0 / 65536, kHalvesBias = 5.0 / 65536, kTreeBias = 12.0 / (1 << 24);
constexpr double kTreeRoom = 1.0 / 1024;  // between the last code of a piece and what follows
// Scales for which slopes, joins and shares near them are ordinary floats.
constexpr float kMinScale = 0x1p-80f, kMaxScale = 0x1p100f;

struct Draws {
    std::uint32_t first, seed;
};

struct CodecLevel {
    std::uint32_t (*largest)(const float* x, std::int64_t count);  // the bits of the greatest magnitude
    // Codes of values that share a scale > 0, not clipped where no magnitude is greater than it; `ahead` is read next.
    void (*encode)(const Table&, const float* x, std::int64_t count, float scale, bool clip, const float* ahead,
                   std::uint8_t* codes);
    void (*draw)(const Table&, const float* x, std::int64_t count, float scale, Draws, std::uint8_t* codes);
    void (*signs)(const float* x, std::int64_t count, std::uint8_t* codes);
    // values[code] for each code; past the caches where `stream` is set.
    void (*decode)(const float* values, const std::uint8_t* codes, std::int64_t count, bool stream, float* out);
};

const CodecLevel& portable_codec();
#if defined(__x86_64__)
const CodecLevel& avx2_codec();
const CodecLevel& avx512_codec();
#endif

// As level_of: null where the processor runs no such level.
const CodecLevel* codec_level(std::int32_t level);

void derive(const float* magnitudes, const float* thresholds, Table& table);

}  // namespace shoal
