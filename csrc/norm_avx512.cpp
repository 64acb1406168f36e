// AVX512: 32 registers: 28 sums, the columns of the weight and one element of the panel.
#if defined(__x86_64__)

#include <cstring>
#include <utility>

#include "norm_conv.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl")
#endif

namespace shoal {
namespace {

constexpr int kLanes = 16, kTileRows = 14, kTileVectors = 2, kDepth = 128;

}  // namespace
}  // namespace shoal

#include "norm_rows.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace shoal {

const Level& avx512_level() { return kLevel; }

}  // namespace shoal

#endif
