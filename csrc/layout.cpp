// Search for a layout inside a capacity: depth first over the order in which blocks are stacked from the bottom up.
//
// The scheme is Moffitt's (MiniMalloc, ASPLOS'23). Some layout with the least sum of offsets is reached by placing blocks
// in the order of their offsets, each as low as those below it allow. So a partial layout is a floor over time, a node
// chooses which block lies next upon it, and three rules cut:
//   - a time whose floor plus all that is still to come there is over the capacity;
//   - a block that another unplaced one would fit below (that one could be lowered);
//   - unplaced blocks that share no time fall apart into searches of their own.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

#include "shoal_native.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::int64_t kNodesBetweenLooks = 256;

struct Item {
    int first, last;  // sections of time, last excluded
    std::int64_t size;
};

struct Lowest {
    int item;
    std::int64_t offset;  // before it was raised
};

class Search {
public:
    Search(std::vector<Item> items, int sections, std::int64_t capacity, std::int64_t most_nodes, Clock::time_point deadline,
           const volatile std::int32_t* stop)
        : items_(std::move(items)), capacity_(capacity), most_nodes_(most_nodes), deadline_(deadline), stop_(stop),
          to_come_(sections, 0), lowest_(items_.size(), 0), offset_(items_.size(), -1), meets_(items_.size()) {
        for (std::size_t i = 0; i < items_.size(); ++i) {
            for (int s = items_[i].first; s < items_[i].last; ++s) to_come_[s] += items_[i].size;
            for (std::size_t j = 0; j < items_.size(); ++j)
                if (i != j && items_[i].first < items_[j].last && items_[j].first < items_[i].last)
                    meets_[i].push_back(static_cast<int>(j));
        }
    }

    std::int32_t run(std::vector<std::int64_t>& offsets) {
        std::vector<int> all(items_.size());
        std::iota(all.begin(), all.end(), 0);
        std::sort(all.begin(), all.end(), [&](int a, int b) { return items_[a].first < items_[b].first; });
        const bool solved = place_all(all, 0, -1);
        offsets = offset_;
        return solved ? SHOAL_LAYOUT_FOUND : gave_up_ ? SHOAL_LAYOUT_GAVE_UP : SHOAL_LAYOUT_IMPOSSIBLE;
    }

private:
    // `items` are unplaced, ascending by their first section.
    bool place_all(const std::vector<int>& items, std::int64_t least_offset, int least_item) {
        if (items.empty()) return true;
        int end = items_[items[0]].last;
        for (std::size_t i = 1; i < items.size(); ++i) {
            if (items_[items[i]].first >= end) return place_parts(items, least_offset, least_item);
            end = std::max(end, items_[items[i]].last);
        }
        return place_next(items, least_offset, least_item);
    }

    bool place_parts(const std::vector<int>& items, std::int64_t least_offset, int least_item) {
        const std::size_t mark = placed_.size();
        std::vector<int> part;
        int end = items_[items[0]].last;
        for (std::size_t i = 0; i <= items.size(); ++i) {
            if (i < items.size() && items_[items[i]].first < end) {
                part.push_back(items[i]);
                end = std::max(end, items_[items[i]].last);
                continue;
            }
            if (!place_all(part, least_offset, least_item)) {
                while (placed_.size() > mark) take_back();
                return false;
            }
            part.clear();
            if (i < items.size()) {
                part.push_back(items[i]);
                end = items_[items[i]].last;
            }
        }
        return true;
    }

    bool place_next(const std::vector<int>& items, std::int64_t least_offset, int least_item) {
        if (out_of_time()) return false;
        // Whatever lies at or above this could have a block below it.
        std::int64_t ceiling = std::numeric_limits<std::int64_t>::max();
        for (int i : items) ceiling = std::min(ceiling, lowest_[i] + items_[i].size);
        if (ceiling <= least_offset || !room_for(items, least_offset)) return false;
        std::vector<int> next;
        for (int i : items) {
            const bool in_order = lowest_[i] > least_offset || (lowest_[i] == least_offset && i > least_item);
            if (in_order && lowest_[i] < ceiling) next.push_back(i);
        }
        std::sort(next.begin(), next.end(), [&](int a, int b) {
            return lowest_[a] != lowest_[b] ? lowest_[a] < lowest_[b] : a < b;
        });
        std::vector<int> others;
        for (int i : next) {
            others.clear();
            for (int j : items)
                if (j != i) others.push_back(j);
            place(i);
            if (place_all(others, offset_[i], i)) return true;
            take_back();
            if (gave_up_) return false;
        }
        return false;
    }

    // Whether no time must hold more than the capacity: the lowest its unplaced blocks can begin, and all of them.
    bool room_for(const std::vector<int>& items, std::int64_t least_offset) {
        const int first = items_[items[0]].first;
        int last = first;
        for (int i : items) last = std::max(last, items_[i].last);
        begins_.assign(last - first, std::numeric_limits<std::int64_t>::max());
        for (int i : items) {
            const std::int64_t begin = std::max(lowest_[i], least_offset);
            if (begin + items_[i].size > capacity_) return false;
            for (int s = items_[i].first; s < items_[i].last; ++s) begins_[s - first] = std::min(begins_[s - first], begin);
        }
        for (int s = first; s < last; ++s)
            if (to_come_[s] > 0 && begins_[s - first] + to_come_[s] > capacity_) return false;
        return true;
    }

    void place(int i) {
        offset_[i] = lowest_[i];
        placed_.push_back({i, raised_.size()});
        for (int s = items_[i].first; s < items_[i].last; ++s) to_come_[s] -= items_[i].size;
        const std::int64_t top = offset_[i] + items_[i].size;
        for (int j : meets_[i]) {
            if (offset_[j] < 0 && lowest_[j] < top) {
                raised_.push_back({j, lowest_[j]});
                lowest_[j] = top;
            }
        }
    }

    void take_back() {
        const auto [i, mark] = placed_.back();
        placed_.pop_back();
        for (; raised_.size() > mark; raised_.pop_back()) lowest_[raised_.back().item] = raised_.back().offset;
        for (int s = items_[i].first; s < items_[i].last; ++s) to_come_[s] += items_[i].size;
        offset_[i] = -1;
    }

    bool out_of_time() {
        if (++nodes_ > most_nodes_) gave_up_ = true;
        if (nodes_ % kNodesBetweenLooks == 0 && (*stop_ != 0 || Clock::now() > deadline_)) gave_up_ = true;
        return gave_up_;
    }

    struct Placed {
        int item;
        std::size_t raised_before;
    };

    const std::vector<Item> items_;
    const std::int64_t capacity_;
    const std::int64_t most_nodes_;
    const Clock::time_point deadline_;
    const volatile std::int32_t* stop_;
    std::vector<std::int64_t> to_come_;  // bytes of unplaced blocks, by section
    std::vector<std::int64_t> lowest_;   // where each block would lie upon the floor
    std::vector<std::int64_t> offset_;   // -1: unplaced
    std::vector<std::vector<int>> meets_;
    std::vector<Placed> placed_;
    std::vector<Lowest> raised_;
    std::vector<std::int64_t> begins_;
    std::int64_t nodes_ = 0;
    bool gave_up_ = false;
};

}  // namespace

SHOAL_API std::int32_t shoal_layout_search(std::int64_t count, const std::int64_t* lower, const std::int64_t* upper,
                                           const std::int64_t* size, std::int64_t capacity, std::int64_t most_nodes,
                                           double seconds, const volatile std::int32_t* stop, std::int64_t* offsets) {
    std::vector<std::int64_t> times(lower, lower + count);
    times.insert(times.end(), upper, upper + count);
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    const auto section = [&](std::int64_t time) {
        return static_cast<int>(std::lower_bound(times.begin(), times.end(), time) - times.begin());
    };
    std::vector<Item> items;
    for (std::int64_t i = 0; i < count; ++i) items.push_back({section(lower[i]), section(upper[i]), size[i]});
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    Search search(std::move(items), static_cast<int>(times.size()), capacity, most_nodes, deadline, stop);
    std::vector<std::int64_t> found;
    const std::int32_t outcome = search.run(found);
    if (outcome == SHOAL_LAYOUT_FOUND) std::copy(found.begin(), found.end(), offsets);
    return outcome;
}
