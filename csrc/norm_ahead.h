// Asks memory for what the next strip reads, a few lines with every tile: the tiles hide the wait, and what
// streams by never throws the panels out.
#pragma once

#include "norm_tile.h"

namespace shoal {
namespace {

class Ahead {
public:
    // The first `channels` floats of every pixel of the strip, `ld` apart.
    void add(const float* pixels, std::int64_t ld, std::int64_t channels, const Strip& strip) {
        const std::int64_t count = std::int64_t{strip.segments} * strip.width, lines = (channels + 15) / 16;
        if (!count) return;
        regions_[count_++] = {pixels + strip.first * ld, ld, lines, count};
        lines_ += lines * count;
    }

    // In as many steps as there will be tiles.
    void deal(std::int64_t tiles) { each_ = int((lines_ + tiles - 1) / tiles); }

    void step() {
        for (int asked = 0; asked < each_ && region_ < count_; ++asked) {
            const Region& region = regions_[region_];
            __builtin_prefetch(region.at + pixel_ * region.ld + 16 * line_, 0, 2);
            if (++line_ < region.lines) continue;
            line_ = 0;
            if (++pixel_ < region.pixels) continue;
            pixel_ = 0;
            ++region_;
        }
    }

private:
    struct Region {
        const float* at;
        std::int64_t ld, lines, pixels;
    };

    Region regions_[3];
    int count_ = 0, region_ = 0, each_ = 0;
    std::int64_t lines_ = 0, pixel_ = 0, line_ = 0;
};

}  // namespace
}  // namespace shoal
