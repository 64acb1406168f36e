// The C ABI of libshoal_native. Functions take pointers and sizes, return no memory and know neither torch nor Python.
#pragma once

#include <cstdint>

#define SHOAL_API extern "C" __attribute__((visibility("default")))

// Raised by one whenever a signature below changes; shoal.native refuses a library of another version.
#define SHOAL_ABI_VERSION 4

SHOAL_API std::int32_t shoal_abi_version();

// Instruction sets this processor and its operating system run, one bit each. shoal.native holds the same list.
enum ShoalFeature : std::uint64_t {
    SHOAL_AVX2 = 1u << 0,
    SHOAL_FMA = 1u << 1,
    SHOAL_F16C = 1u << 2,
    SHOAL_AVX512F = 1u << 3,
    SHOAL_AVX512BW = 1u << 4,
    SHOAL_AVX512VL = 1u << 5,
    SHOAL_AVX512VBMI = 1u << 6,
    SHOAL_AVX512BF16 = 1u << 7,
    SHOAL_NEON = 1u << 8,
};

SHOAL_API std::uint64_t shoal_cpu_features();

enum ShoalLayoutOutcome : std::int32_t {
    SHOAL_LAYOUT_FOUND = 0,
    SHOAL_LAYOUT_IMPOSSIBLE = 1,
    SHOAL_LAYOUT_GAVE_UP = 2,  // out of nodes or seconds, or told to stop
};

// The rules of the search that it is exact without, only slower: csrc/layout.cpp says what each is.
enum ShoalLayoutRule : std::uint32_t {
    SHOAL_LAYOUT_LOWEST = 1u << 0,
    SHOAL_LAYOUT_PAIR = 1u << 1,
    SHOAL_LAYOUT_GAP = 1u << 2,
    SHOAL_LAYOUT_PARTS = 1u << 3,
    SHOAL_LAYOUT_FAILURES = 1u << 4,
};

// Addresses for `count` blocks, each of `size` > 0 bytes in use from `lower` to `upper` (excluded), below `capacity`. Among
// blocks that can lie equally low the first is tried first, so their order matters. `failures` has `count` elements: how
// often the search failed in each section of time is added to them. They say where to begin: zeros at first, then what
// the attempt before left. `stop` may be set from another thread. `offsets` is written only where a layout was found.
SHOAL_API std::int32_t shoal_layout_search(std::int64_t count, const std::int64_t* lower, const std::int64_t* upper,
                                           const std::int64_t* size, std::int64_t capacity, std::uint32_t rules,
                                           std::int64_t most_nodes, double seconds, const volatile std::int32_t* stop,
                                           std::int64_t* failures, std::int64_t* offsets);

// LeakyReLU(slope) after batch norm: `forward` writes LeakyReLU(y * steep + shift), which may lie over y. Its backward, from the result y of the two, float32. Pixels in NHWC order where
// channels_last is set, else in NCHW order. With dz the gradient before the activation and z - shift what the result says
// was scaled: `sums` writes sum(dz) and sum(dz * (z - shift)) of each channel, and `result` writes
// (dz - slide - (z - shift) * tilt) * steep, which may lie over the gradient.
struct ShoalInvertedBatchNorm {
    std::int64_t images, channels, pixels;
    std::int32_t channels_last, threads;
    std::int32_t level;  // 0 portable, 1 no more than AVX2, negative the best this processor runs
    float slope;         // more than 0; 1 for no activation
    const float *grad, *y, *shift;
    double *sum, *centred, *workspace;  // of `sums`; workspace: 2 * threads * channels
    const float *slide, *tilt, *steep;  // of `result`; steep also of `forward`
    float* result;                      // of `result` and `forward`
};

SHOAL_API void shoal_inverted_batch_norm_forward(const ShoalInvertedBatchNorm* call);
SHOAL_API void shoal_inverted_batch_norm_sums(const ShoalInvertedBatchNorm* call);
SHOAL_API void shoal_inverted_batch_norm_result(const ShoalInvertedBatchNorm* call);
