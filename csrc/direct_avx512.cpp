// AVX512: 32 registers: 24 sums and what is read; weights are spread where they are multiplied.
#if defined(__x86_64__)

#include <cstring>

#include "direct_conv.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl")
#endif

namespace shoal {
namespace {

constexpr int kLanes = 16, kChannels = 8, kSums = 24, kMostVectors = 8;
constexpr int kGradChannels = 4, kReads = 6;

}  // namespace
}  // namespace shoal

#include "direct_tile.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace shoal {

const DirectLevel& avx512_direct() { return kDirect; }

}  // namespace shoal

#endif
