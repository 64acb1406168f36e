// shoal_layout_search against every order in which few blocks can be put down, and many blocks against the contract.
#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "buffer.h"
#include "fuzz.h"
#include "shoal_native.h"

namespace fuzz {
namespace {

struct Blocks {
    std::vector<std::int64_t> lower, upper, size;

    std::int64_t count() const { return static_cast<std::int64_t>(size.size()); }
    bool meet(std::size_t i, std::size_t j) const { return lower[i] < upper[j] && lower[j] < upper[i]; }

    std::int64_t bytes() const { return std::accumulate(size.begin(), size.end(), std::int64_t{0}); }

    std::int64_t most_in_use() const {
        std::int64_t most = 0;
        for (std::size_t i = 0; i < size.size(); ++i) {  // the most are in use where one begins
            std::int64_t bytes = 0;
            for (std::size_t j = 0; j < size.size(); ++j)
                if (lower[j] <= lower[i] && lower[i] < upper[j]) bytes += size[j];
            most = std::max(most, bytes);
        }
        return most;
    }

    // Each block upon those it meets that were put down before. Of all orders the best is the best layout there is: put
    // down by their offsets in one, no block comes to lie higher than it does there.
    std::int64_t height(const std::vector<std::size_t>& order) const {
        std::vector<std::int64_t> top(size.size());
        std::int64_t highest = 0;
        for (std::size_t k = 0; k < order.size(); ++k) {
            std::int64_t offset = 0;
            for (std::size_t before = 0; before < k; ++before)
                if (meet(order[before], order[k])) offset = std::max(offset, top[order[before]]);
            top[order[k]] = offset + size[order[k]];
            highest = std::max(highest, top[order[k]]);
        }
        return highest;
    }

    std::int64_t smallest() const {
        std::vector<std::size_t> order(size.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::int64_t least = std::numeric_limits<std::int64_t>::max();
        do least = std::min(least, height(order));
        while (std::next_permutation(order.begin(), order.end()));
        return least;
    }
};

constexpr std::int64_t kFew = 7;  // 5040 orders

Blocks drawn(Draw& draw) {
    Blocks blocks;
    const std::int64_t count = draw.chance(60) ? draw.from(0, kFew) : draw.from(kFew + 1, 40);
    const std::int64_t times = draw.from(1, 2 * count + 1), most = draw.of<std::int64_t>({1, 3, 10, 1000});
    const std::int64_t unit = draw.of<std::int64_t>({1, 64, std::int64_t{1} << 46});
    const std::int64_t epoch = draw.of<std::int64_t>({0, -times / 2, std::int64_t{1} << 62});
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t begin = draw.from(0, times - 1);
        blocks.lower.push_back(epoch + begin);
        blocks.upper.push_back(epoch + draw.from(begin + 1, draw.chance(50) ? std::min(times, begin + 3) : times));
        blocks.size.push_back(unit * draw.from(1, most));
    }
    return blocks;
}

}  // namespace

void layout(Draw& draw) {
    now_running("layout: drawing");
    const Blocks blocks = drawn(draw);
    const std::int64_t count = blocks.count(), bound = blocks.most_in_use(), all = blocks.bytes();
    const std::int64_t known = count <= kFew ? blocks.smallest() : -1;
    const std::int64_t capacity = std::max<std::int64_t>(
        0, draw.of({bound, bound, bound - 1, known < 0 ? bound + bound / 8 : known, known < 0 ? all : known - 1, all}));
    const auto rules = static_cast<std::uint32_t>(draw.chance(50) ? 31 : draw.from(0, 31));
    const std::int64_t most_nodes = draw.chance(70) ? 3000 : draw.from(0, 20);
    // Also for ever. Seconds that a slow machine may run out of say nothing about the search.
    const double seconds = draw.of({1e6, 1e18, std::numeric_limits<double>::infinity()});
    const volatile std::int32_t stop = draw.chance(3);
    now_running("layout: %lld blocks in %lld bytes, at least %lld, at best %lld; rules %u, %lld nodes, %g s, stop %d",
                static_cast<long long>(count), static_cast<long long>(capacity), static_cast<long long>(bound),
                static_cast<long long>(known), rules, static_cast<long long>(most_nodes), seconds, stop);
    Buffer<std::int64_t> lower(draw, "lower", Use::kRead, count), upper(draw, "upper", Use::kRead, count);
    Buffer<std::int64_t> size(draw, "size", Use::kRead, count);
    Buffer<std::int64_t> failures(draw, "failures", Use::kWritten, count),
        offsets(draw, "offsets", Use::kWritten, count);
    std::copy(blocks.lower.begin(), blocks.lower.end(), lower.data());
    std::copy(blocks.upper.begin(), blocks.upper.end(), upper.data());
    std::copy(blocks.size.begin(), blocks.size.end(), size.data());
    for (std::int64_t i = 0; i < count; ++i) failures.at(0, i) = draw.chance(50) ? 0 : draw.from(0, 100);
    const std::vector<std::int64_t> failed(failures.data(), failures.data() + count);
    std::int32_t outcome = SHOAL_LAYOUT_GAVE_UP;
    guarded({&lower, &upper, &size, &failures, &offsets}, [&] {
        outcome = shoal_layout_search(count, lower.data(), upper.data(), size.data(), capacity, rules, most_nodes,
                                      seconds, &stop, failures.data(), offsets.data());
    });

    for (std::int64_t i = 0; i < count; ++i)
        if (failures.at(0, i) < failed[static_cast<std::size_t>(i)]) fail("failures of a section became fewer");
    if (outcome != SHOAL_LAYOUT_FOUND) {
        for (std::int64_t i = 0; i < count; ++i)
            if (offsets.at(0, i) != -1) fail("offsets written without a layout");
    }
    if (outcome == SHOAL_LAYOUT_GAVE_UP) {
        if (most_nodes == 3000 && known >= 0 && !stop && rules == 31)
            fail("gave up on %lld blocks", static_cast<long long>(count));
        return;
    }
    if (outcome == SHOAL_LAYOUT_IMPOSSIBLE) {
        if (known >= 0 && known <= capacity) fail("called impossible");
        if (capacity >= all) fail("called impossible, and there is room for all blocks at once");
        return;
    }
    if (outcome != SHOAL_LAYOUT_FOUND) fail("no such outcome: %d", outcome);
    if (capacity < bound || (known >= 0 && capacity < known)) fail("found a layout below the least there is");
    std::int64_t highest = 0;
    for (std::size_t i = 0; i < blocks.size.size(); ++i) {
        const std::int64_t offset = offsets.at(0, static_cast<std::int64_t>(i)), end = offset + blocks.size[i];
        if (offset < 0 || end > capacity) fail("block %zu lies outside the capacity", i);
        highest = std::max(highest, end);
        for (std::size_t j = 0; j < i; ++j) {
            const std::int64_t other = offsets.at(0, static_cast<std::int64_t>(j));
            if (blocks.meet(i, j) && offset < other + blocks.size[j] && other < end)
                fail("blocks %zu and %zu overlap", j, i);
        }
    }
    if (highest < bound) fail("the layout is smaller than what is in use at once");
}

}  // namespace fuzz
