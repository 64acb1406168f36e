// The sign bits of an encoded ReLU: set where its output is 0 or clipped, and lets no gradient through.
#include "shoal_native.h"

// Three copies, of which the loader takes the best that the processor runs.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define SHOAL_BEST_OF __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define SHOAL_BEST_OF
#endif

namespace {

constexpr std::int64_t kPiece = 1 << 12;  // as many values as a thread takes at a time

SHOAL_BEST_OF void note(const float* x, std::int64_t count, float above, std::uint8_t* codes) {
    for (std::int64_t i = 0; i < count; ++i) {
        const bool closed = (x[i] <= 0.0f) | (x[i] >= above);  // not of a NaN
        codes[i] = static_cast<std::uint8_t>((codes[i] & 0x7f) | (closed ? 0x80 : 0));
    }
}

}  // namespace

SHOAL_API void shoal_note_closed(const float* x, std::int64_t elements, float above, std::int32_t threads,
                                 std::uint8_t* codes) {
    const std::int64_t pieces = (elements + kPiece - 1) / kPiece;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
        const std::int64_t first = piece * kPiece;
        const std::int64_t count = elements - first < kPiece ? elements - first : kPiece;
        note(x + first, count, above, codes + first);
    }
}
