// For every processor: vectors of four floats, which SSE2 and NEON both have.
#include "norm_conv.h"

namespace shoal {
namespace {

constexpr int kLanes = 4, kTileRows = 6, kTileVectors = 2, kDepth = 256;

}  // namespace
}  // namespace shoal

#include "norm_rows.h"

namespace shoal {

const Level& portable_level() { return kLevel; }

}  // namespace shoal
