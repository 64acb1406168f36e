// For every processor: vectors of four floats, which SSE2 and NEON both have.
namespace shoal {
namespace {

constexpr int kLanes = 4;

}  // namespace
}  // namespace shoal

#include "max_pool_tile.h"

namespace shoal {

const PoolLevel& portable_pool() { return kPool; }

}  // namespace shoal
