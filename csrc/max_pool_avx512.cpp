// AVX512: vectors of sixteen floats.
#if defined(__x86_64__)

#include <cstring>

#include "max_pool.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl")
#endif

namespace shoal {
namespace {

constexpr int kLanes = 16;

}  // namespace
}  // namespace shoal

#include "max_pool_tile.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace shoal {

const PoolLevel& avx512_pool() { return kPool; }

}  // namespace shoal

#endif
