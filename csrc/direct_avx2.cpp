// AVX2: sixteen registers: twelve sums, what is read, and one weight.
#if defined(__x86_64__)

#include <cstring>

#include "direct_conv.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace shoal {
namespace {

constexpr int kLanes = 8, kChannels = 4, kSums = 12, kMostVectors = 4;
constexpr int kGradChannels = 4, kReads = 3;

}  // namespace
}  // namespace shoal

#include "direct_tile.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace shoal {

const DirectLevel& avx2_direct() { return kDirect; }

}  // namespace shoal

#endif
