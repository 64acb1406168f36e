// For every processor: vectors of four floats, which SSE2 and NEON both have.
namespace shoal {
namespace {

constexpr int kLanes = 4, kChannels = 4, kSums = 12, kMostVectors = 4;
constexpr int kGradChannels = 4, kReads = 3;

}  // namespace
}  // namespace shoal

#include "direct_tile.h"

namespace shoal {

const DirectLevel& portable_direct() { return kDirect; }

}  // namespace shoal
