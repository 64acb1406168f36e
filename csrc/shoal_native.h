// The C ABI of libshoal_native. Functions take pointers and sizes, allocate nothing and know neither torch nor Python.
#pragma once

#include <cstdint>

#define SHOAL_API extern "C" __attribute__((visibility("default")))

// Raised by one whenever a signature below changes; shoal.native refuses a library of another version.
#define SHOAL_ABI_VERSION 1

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
