// Tensors of table codes: blocks dealt out to threads, large ones in parts. The result does not depend on how many.
#include "codec_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace shoal {
namespace {

constexpr std::int64_t kCached = 1 << 14;  // elements of a block that are still near when their scale is known

std::int64_t blocks_of(const ShoalTableCodec& call) {
    return (call.elements + call.block_elements - 1) / call.block_elements;
}

struct Work {
    const ShoalTableCodec& call;
    const CodecLevel& level;
    const Table& table;

    float scale_of(std::uint32_t largest) const {
        if (largest >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
        if (call.has_scale) return call.scale;
        float scale;
        std::memcpy(&scale, &largest, sizeof scale);
        return scale;
    }

    // Elements from `first` on that share a scale.
    void encode(std::int64_t first, std::int64_t count, float scale, bool more) const {
        const float* x = call.x + first;
        std::uint8_t* codes = call.codes + first;
        if (!(scale > 0)) return level.signs(x, count, codes);
        if (call.draws) {
            const Draws draws{static_cast<std::uint32_t>(call.first_element + first), call.seed};
            return level.draw(table, x, count, scale, draws, codes);
        }
        level.encode(table, x, count, scale, call.has_scale, more ? x + count : nullptr, codes);
    }

    void encode_block(std::int64_t block) const {
        const std::int64_t first = block * call.block_elements;
        const std::int64_t count = std::min(call.block_elements, call.elements - first);
        const float scale = scale_of(level.largest(call.x + first, count));
        call.scales[block] = scale;
        for (std::int64_t part = 0; part < count; part += kCached) {
            const std::int64_t elements = std::min(kCached, count - part);
            // The next block is asked for while this one is computed.
            encode(first + part, elements, scale, first + part + 2 * elements <= call.elements);
        }
    }

    // All threads on one block.
    void encode_large(std::int64_t block) const {
        const std::int64_t first = block * call.block_elements;
        const std::int64_t count = std::min(call.block_elements, call.elements - first);
        const std::int64_t parts = (count + kCached - 1) / kCached;
        std::uint32_t most = 0;
#pragma omp parallel for num_threads(call.threads) schedule(static) reduction(max : most)
        for (std::int64_t part = 0; part < parts; ++part)
            most = std::max(most, level.largest(call.x + first + part * kCached,
                                                std::min(kCached, count - part * kCached)));
        const float scale = scale_of(most);
        call.scales[block] = scale;
#pragma omp parallel for num_threads(call.threads) schedule(static)
        for (std::int64_t part = 0; part < parts; ++part) {
            const std::int64_t elements = std::min(kCached, count - part * kCached);
            encode(first + part * kCached, elements, scale, part + 2 < parts);
        }
    }

    // What each code stands for, over one scale.
    void values_of(float scale, float* values) const {
        for (int index = 0; index < kMagnitudes; ++index) {
            const float value = table.magnitude[index] * scale;
            values[index] = scale == scale ? value : std::numeric_limits<float>::quiet_NaN();
            values[kMagnitudes + index] = scale == scale ? -value : std::numeric_limits<float>::quiet_NaN();
        }
    }

    void decode_blocks(std::int64_t first, std::int64_t last, bool stream) const {
        alignas(64) float values[2 * kMagnitudes];
        for (std::int64_t block = first; block < last; ++block) {
            const std::int64_t begin = block * call.block_elements;
            const std::int64_t count = std::min(call.block_elements, call.elements - begin);
            values_of(call.scales[block], values);
            level.decode(values, call.codes + begin, count, stream, call.out + begin);
        }
    }

    void decode_large(std::int64_t block, bool stream) const {
        alignas(64) float values[2 * kMagnitudes];
        const std::int64_t begin = block * call.block_elements;
        const std::int64_t count = std::min(call.block_elements, call.elements - begin);
        const std::int64_t parts = (count + kCached - 1) / kCached;
        values_of(call.scales[block], values);
#pragma omp parallel for num_threads(call.threads) schedule(static)
        for (std::int64_t part = 0; part < parts; ++part)
            level.decode(values, call.codes + begin + part * kCached, std::min(kCached, count - part * kCached),
                         stream, call.out + begin + part * kCached);
    }
};

constexpr std::int64_t kMeanPart = 4096;  // elements whose values and decoded messages stay in L1

void add_block(const Work& work, const ShoalTableMean& call, std::int64_t message, std::int64_t block) {
    alignas(64) float values[2 * kMagnitudes], came[kMeanPart];
    const std::int64_t first = block * work.call.block_elements;
    const std::int64_t count = std::min(work.call.block_elements, work.call.elements - first);
    work.values_of(call.scales[message][block], values);
    for (std::int64_t part = 0; part < count; part += kMeanPart) {
        const std::int64_t elements = std::min(kMeanPart, count - part);
        float* sum = work.call.out + first + part;
        work.level.decode(values, call.codes[message] + first + part, elements, false, came);
        for (std::int64_t i = 0; i < elements; ++i) sum[i] += came[i];
    }
}

// A division is exact where a product with the inverse is: by powers of two, and these are most numbers of ranks.
void divide(float* values, std::int64_t count, float divisor) {
    int exponent;
    if (std::frexp(divisor, &exponent) == 0.5f) {
        const float inverse = 1 / divisor;
        for (std::int64_t i = 0; i < count; ++i) values[i] *= inverse;
        return;
    }
    for (std::int64_t i = 0; i < count; ++i) values[i] /= divisor;
}

// Few large blocks are each shared among the threads.
bool shares_blocks(const ShoalTableCodec& call) {
    return call.threads > 1 && call.block_elements > kCached && blocks_of(call) < 4 * call.threads;
}

}  // namespace

const CodecLevel* codec_level(std::int32_t level) {
    if (level == SHOAL_PORTABLE) return &portable_codec();
#if defined(__x86_64__)
    const std::uint64_t has = shoal_cpu_features();
    constexpr std::uint64_t narrow = SHOAL_AVX2 | SHOAL_FMA;
    constexpr std::uint64_t wide = narrow | SHOAL_AVX512F | SHOAL_AVX512BW | SHOAL_AVX512VL;
    if ((level < 0 || level == SHOAL_AVX512_LEVEL) && (has & wide) == wide) return &avx512_codec();
    if ((level < 0 || level == SHOAL_AVX2_LEVEL) && (has & narrow) == narrow) return &avx2_codec();
#endif
    return level < 0 ? &portable_codec() : nullptr;
}

}  // namespace shoal

SHOAL_API std::int64_t shoal_codec_table_bytes() { return sizeof(shoal::Table); }

SHOAL_API void shoal_codec_table(const float* magnitudes, const float* thresholds, void* table) {
    shoal::derive(magnitudes, thresholds, *static_cast<shoal::Table*>(table));
}

SHOAL_API std::int32_t shoal_table_encode(const ShoalTableCodec* call) {
    const shoal::CodecLevel* level = shoal::codec_level(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    const shoal::Work work{*call, *level, *static_cast<const shoal::Table*>(call->table)};
    const std::int64_t blocks = shoal::blocks_of(*call);
    if (shoal::shares_blocks(*call)) {
        for (std::int64_t block = 0; block < blocks; ++block) work.encode_large(block);
        return SHOAL_DONE;
    }
#pragma omp parallel for num_threads(call->threads) schedule(static)
    for (std::int64_t block = 0; block < blocks; ++block) work.encode_block(block);
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_table_decode(const ShoalTableCodec* call) {
    const shoal::CodecLevel* level = shoal::codec_level(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    const shoal::Work work{*call, *level, *static_cast<const shoal::Table*>(call->table)};
    const std::int64_t blocks = shoal::blocks_of(*call), parts = call->threads;
    const bool stream = call->elements >= shoal::kStreamed;
    if (shoal::shares_blocks(*call)) {
        for (std::int64_t block = 0; block < blocks; ++block) work.decode_large(block, stream);
        return SHOAL_DONE;
    }
#pragma omp parallel for num_threads(call->threads) schedule(static, 1)
    for (std::int64_t part = 0; part < parts; ++part)
        work.decode_blocks(blocks * part / parts, blocks * (part + 1) / parts, stream);
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_table_mean(const ShoalTableMean* call) {
    const ShoalTableCodec& codec = call->codec;
    const shoal::CodecLevel* level = shoal::codec_level(codec.level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    const shoal::Work work{codec, *level, *static_cast<const shoal::Table*>(codec.table)};
    const std::int64_t blocks = shoal::blocks_of(codec);
#pragma omp parallel for num_threads(codec.threads) schedule(static)
    for (std::int64_t block = 0; block < blocks; ++block) {
        const std::int64_t first = block * codec.block_elements;
        for (std::int64_t message = 0; message < call->messages; ++message)
            shoal::add_block(work, *call, message, block);
        shoal::divide(codec.out + first, std::min(codec.block_elements, codec.elements - first), call->divisor);
        work.encode_block(block);
        work.decode_blocks(block, block + 1, false);
    }
    return SHOAL_DONE;
}
