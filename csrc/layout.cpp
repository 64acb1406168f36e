// Search for a layout inside a capacity: depth first over decisions that narrow where blocks can still lie.
//
// As in Moffitt's MiniMalloc (ASPLOS'23) only layouts with the least sum of offsets are looked for. There each block
// lies on its floor, the tops of the blocks placed so far, or on a block that is still to be placed. So a node takes a
// block that nothing can lie below any more and tries two ways: it lies on its floor, or it is raised. Blocks that
// share a time lie one above the other, as jobs on a machine follow one another, so the rules that cut are those of
// scheduling:
//   - pack: in each section of time the blocks from some height up must fit between it and the capacity;
//   - LOWEST: a block that would not fit among or above such blocks lies below them all (edge finding);
//   - PAIR: if one of two blocks cannot lie below the other, it lies above;
//   - support: a raised block lies on another, so at least as high as the lowest top there can be;
//   - GAP: a raised block that nothing can come to lie in place of could be lowered: no layout to look for;
//   - PARTS: unplaced blocks that share no time fall apart into searches of their own;
//   - FAILURES: the next block is of the section that failed most for what it leaves over (dom/wdeg, Boussemart, 2004):
//     what fails in one place is not tried again for each arrangement of another. The caller keeps the counts.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

#include "shoal_native.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::int64_t kNowhere = std::numeric_limits<std::int64_t>::max();
constexpr double kSlackShare = 0.01;  // of the capacity, added to the bytes left over in a section
constexpr double kForEverSeconds = 1e9;  // thirty years; the clock counts three hundred in nanoseconds

struct Item {
    int first, last;  // sections of time, last excluded
    std::int64_t size;
};

struct Room {
    std::int64_t floor;        // upon the placed blocks
    std::int64_t least, most;  // offsets that are not ruled out; a block is raised when its least is above its floor
};

struct Event {
    std::int64_t time;
    bool begins;
    std::int64_t item;
};

class Search {
public:
    Search(std::vector<Item> items, int sections, std::int64_t capacity, std::uint32_t rules, std::int64_t most_nodes,
           Clock::time_point deadline, const volatile std::int32_t* stop, std::int64_t* failures)
        : items_(std::move(items)), capacity_(capacity), rules_(rules), most_nodes_(most_nodes), deadline_(deadline),
          stop_(stop), failures_(failures), room_(items_.size()), placed_(items_.size(), false),
          supported_(items_.size()), meets_(items_.size()), members_(sections), slack_(sections, capacity),
          queued_(items_.size(), false), pending_(sections, false) {
        for (std::size_t i = 0; i < items_.size(); ++i) {
            room_[i] = {0, 0, capacity - items_[i].size};
            for (int s = items_[i].first; s < items_[i].last; ++s) members_[s].push_back(static_cast<int>(i));
            for (std::size_t j = 0; j < items_.size(); ++j)
                if (i != j && items_[i].first < items_[j].last && items_[j].first < items_[i].last)
                    meets_[i].push_back(static_cast<int>(j));
        }
    }

    std::int32_t run(std::int64_t* offsets) {
        std::vector<int> all(items_.size());
        std::iota(all.begin(), all.end(), 0);
        std::stable_sort(all.begin(), all.end(), [&](int a, int b) { return items_[a].first < items_[b].first; });
        for (int i : all) look_at_sections_of(i);
        int task = infer(all) ? split(all, kDone) : kNone;
        while (task >= 0) {
            while (choices_.size() > tasks_[task].choices) choices_.pop_back();  // of parts that are done: they stand
            if (++nodes_ > most_nodes_ || *stop_ != 0 || Clock::now() > deadline_) return SHOAL_LAYOUT_GAVE_UP;
            const int next = choose(tasks_[task].items);
            choices_.push_back({next, task, can_stand_on_another(next), changes_.size(), slacks_.size(), order_.size(),
                                tasks_.size()});
            std::vector<int> others;
            for (int i : tasks_[task].items)
                if (i != next) others.push_back(i);
            task = place(next) && infer(others) ? split(others, tasks_[task].then) : go_back();
        }
        if (task == kNone) return SHOAL_LAYOUT_IMPOSSIBLE;
        for (std::size_t i = 0; i < items_.size(); ++i) offsets[i] = room_[i].least;
        return SHOAL_LAYOUT_FOUND;
    }

private:
    static constexpr int kDone = -1, kNone = -2;  // in place of a task

    struct Task {
        std::vector<int> items;  // unplaced, ascending by their first section
        int then;                // the task that follows
        std::size_t choices;     // made before it
    };
    struct Choice {
        int item, task;
        bool may_be_raised;
        std::size_t changes, slacks, order, tasks;  // made before it
    };
    struct Change {
        int item;
        Room before;
    };
    struct Slack {
        int section;
        std::int64_t before;
    };

    // A task for each part that shares no time with the others, the smallest first.
    int split(const std::vector<int>& items, int then) {
        std::vector<std::vector<int>> parts;
        int end = 0;
        for (int i : items) {
            if (parts.empty() || (items_[i].first >= end && has(SHOAL_LAYOUT_PARTS))) parts.emplace_back();
            parts.back().push_back(i);
            end = std::max(end, items_[i].last);
        }
        std::stable_sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.size() > b.size(); });
        for (std::vector<int>& part : parts) {
            tasks_.push_back({std::move(part), then, choices_.size()});
            then = static_cast<int>(tasks_.size()) - 1;
        }
        return then;
    }

    // The last choice that has another way, and that way taken.
    int go_back() {
        while (!choices_.empty()) {
            const Choice last = choices_.back();
            choices_.pop_back();
            for (; order_.size() > last.order; order_.pop_back()) placed_[order_.back()] = false;
            for (; changes_.size() > last.changes; changes_.pop_back())
                room_[changes_.back().item] = changes_.back().before;
            for (; slacks_.size() > last.slacks; slacks_.pop_back())
                slack_[slacks_.back().section] = slacks_.back().before;
            while (tasks_.size() > last.tasks) tasks_.pop_back();
            if (last.may_be_raised && raise(last.item, room_[last.item].floor + 1, items_[last.item].first) &&
                infer(tasks_[last.task].items))
                return last.task;
        }
        return kNone;
    }

    // In the section that failed most for what is left over there: the lowest block, or what can lie below that.
    int choose(const std::vector<int>& items) const {
        int end = 0;
        for (int i : items) end = std::max(end, items_[i].last);
        int section = -1;
        double highest = 0;
        for (int s = items_[items[0]].first; s < end; ++s) {
            if (slack_[s] == capacity_) continue;  // its blocks are all placed
            const std::int64_t failures = has(SHOAL_LAYOUT_FAILURES) ? failures_[s] : 0;
            const double score = static_cast<double>(failures + 1) /
                                 (static_cast<double>(slack_[s]) + kSlackShare * static_cast<double>(capacity_));
            if (score > highest) {
                highest = score;
                section = s;
            }
        }
        int lowest = -1;
        const auto consider = [&](int i) {
            if (placed_[i]) return;
            const std::int64_t higher = lowest < 0 ? 1 : room_[lowest].least - room_[i].least;
            if (higher > 0 || (higher == 0 && i < lowest)) lowest = i;
        };
        for (int i : members_[section]) consider(i);
        for (int above = -1; above != lowest;) {
            above = lowest;
            for (int j : meets_[above])
                if (top(j) <= room_[above].least) consider(j);
        }
        return lowest;
    }

    // Carries all changes on until nothing follows from them; false: there is no layout.
    bool infer(const std::vector<int>& items) {
        lowest_most_ = capacity_;
        highest_top_ = 0;
        for (int i : items) {
            lowest_most_ = std::min(lowest_most_, room_[i].most);
            highest_top_ = std::max(highest_top_, top(i));
        }
        for (bool possible = true; possible;) {
            if (!changed_.empty()) {
                const int i = changed_.back();
                changed_.pop_back();
                queued_[i] = false;
                look_at_sections_of(i);
                possible = order_pairs(i);
            } else if (!sections_.empty()) {
                const int s = sections_.back();
                sections_.pop_back();
                pending_[s] = false;
                possible = pack(s);
            } else {
                possible = support(items);
                if (possible && changed_.empty()) return true;
            }
        }
        return false;
    }

    // What follows from the blocks of one section, from the highest down.
    bool pack(int s) {
        std::vector<int>& here = members_[s];
        const auto is_above = [&](int i, int j) { return room_[i].least > room_[j].least; };
        for (std::size_t k = 1; k < here.size(); ++k)  // they are nearly in order from the last time
            for (std::size_t at = k; at > 0 && is_above(here[at], here[at - 1]); --at)
                std::swap(here[at], here[at - 1]);
        below_.clear();
        std::int64_t bytes = 0, height = 0, slack = capacity_;
        for (std::size_t k = 0; k < here.size() && !placed_[here[k]]; ++k) {  // placed blocks lie below all others
            const int i = here[k];
            bytes += items_[i].size;
            slack = std::min(slack, capacity_ - room_[i].least - bytes);
            if (slack < 0) return failed(s);
            if (k > 0 && height + bytes > capacity_ && has(SHOAL_LAYOUT_LOWEST)) {
                below_.push_back(k);
                if (!lower(i, capacity_ - bytes, s)) return false;
            }
            height = room_[i].least;
        }
        for (; !below_.empty(); below_.pop_back()) {
            const int i = here[below_.back()];
            const std::size_t next = below_.size() > 1 ? below_[below_.size() - 2] : 0;
            for (std::size_t k = below_.back(); k-- > next;)
                if (!raise(here[k], top(i), s)) return false;
        }
        if (slack != slack_[s]) {
            slacks_.push_back({s, slack_[s]});
            slack_[s] = slack;
        }
        return true;
    }

    // What follows for pairs of which block `i` is one.
    bool order_pairs(int i) {
        if (!has(SHOAL_LAYOUT_PAIR)) return true;
        if (top(i) <= lowest_most_ && highest_top_ <= room_[i].most) return true;
        for (int j : meets_[i]) {
            if (placed_[j]) continue;
            if (top(i) > room_[j].most && !put_below(j, i)) return false;
            if (top(j) > room_[i].most && !put_below(i, j)) return false;
        }
        return true;
    }

    bool put_below(int i, int j) {
        const int s = shared_section(i, j);
        return raise(j, top(i), s) && lower(i, room_[j].most - items_[i].size, s);
    }

    // From the blocks on their floors upwards: the lowest that a raised one can be is the top of another.
    bool support(const std::vector<int>& items) {
        raised_.clear();
        for (int i : items) {
            const bool raised = room_[i].least > room_[i].floor;
            if (raised && !can_stand_on_another(i)) return failed(items_[i].first);
            if (raised) raised_.push_back(i);
            supported_[i] = raised ? kNowhere : room_[i].least;
        }
        for (bool changed = true; changed;) {
            changed = false;
            for (int i : raised_) {
                std::int64_t lowest = kNowhere;
                for (int j : meets_[i])
                    if (!placed_[j] && supported_[j] < kNowhere)
                        lowest = std::min(lowest, supported_[j] + items_[j].size);
                lowest = std::max(lowest, room_[i].least);
                changed |= lowest < supported_[i];
                supported_[i] = std::min(lowest, supported_[i]);
            }
        }
        for (int i : raised_)
            if (!raise(i, supported_[i], items_[i].first)) return false;
        return true;
    }

    // Whether anything can come to lie where block `i` would be on its floor; else there is no reason to raise it.
    bool can_stand_on_another(int i) const {
        if (!has(SHOAL_LAYOUT_GAP)) return true;
        const std::int64_t end = room_[i].floor + items_[i].size;
        for (int j : meets_[i])
            if (!placed_[j] && room_[j].least < end) return true;
        return false;
    }

    bool raise(int i, std::int64_t least, int section) {
        if (least <= room_[i].least) return true;
        if (least > room_[i].most) return failed(section);
        change(i).least = least;
        highest_top_ = std::max(highest_top_, top(i));
        return true;
    }

    bool lower(int i, std::int64_t most, int section) {
        if (most >= room_[i].most) return true;
        if (most < room_[i].least) return failed(section);
        change(i).most = most;
        lowest_most_ = std::min(lowest_most_, most);
        return true;
    }

    Room& change(int i) {
        changes_.push_back({i, room_[i]});
        if (!queued_[i]) {
            queued_[i] = true;
            changed_.push_back(i);
        }
        return room_[i];
    }

    bool failed(int section) {
        ++failures_[section];
        for (int i : changed_) queued_[i] = false;
        changed_.clear();
        for (int s : sections_) pending_[s] = false;
        sections_.clear();
        return false;
    }

    void look_at_sections_of(int i) {
        for (int s = items_[i].first; s < items_[i].last; ++s) {
            if (pending_[s]) continue;
            pending_[s] = true;
            sections_.push_back(s);
        }
    }

    bool place(int i) {
        placed_[i] = true;
        order_.push_back(i);
        look_at_sections_of(i);
        for (int j : meets_[i]) {
            if (placed_[j] || room_[j].floor >= top(i)) continue;
            if (top(i) > room_[j].most) return failed(shared_section(i, j));
            Room& room = change(j);
            room.floor = top(i);
            room.least = std::max(room.least, top(i));
        }
        return true;
    }

    std::int64_t top(int i) const { return room_[i].least + items_[i].size; }  // the lowest that it can be

    int shared_section(int i, int j) const { return std::max(items_[i].first, items_[j].first); }

    bool has(ShoalLayoutRule rule) const { return (rules_ & rule) != 0; }

    const std::vector<Item> items_;
    const std::int64_t capacity_;
    const std::uint32_t rules_;
    const std::int64_t most_nodes_;
    const Clock::time_point deadline_;
    const volatile std::int32_t* stop_;
    std::int64_t* failures_;  // by section
    std::vector<Room> room_;
    std::vector<char> placed_;
    std::vector<std::int64_t> supported_;
    std::vector<std::vector<int>> meets_;    // by block: those that share a time with it
    std::vector<std::vector<int>> members_;  // by section
    std::vector<std::int64_t> slack_;        // by section: what its tightest stack leaves over
    std::vector<int> changed_, sections_;    // what `infer` is to look at
    std::vector<char> queued_, pending_;     // whether a block, a section is among them
    std::vector<Task> tasks_;
    std::vector<Choice> choices_;
    std::vector<Change> changes_;  // from here on what is taken back, the last first
    std::vector<Slack> slacks_;
    std::vector<int> order_;  // in which blocks were placed
    std::vector<int> raised_;
    std::vector<std::size_t> below_;
    std::int64_t lowest_most_ = 0, highest_top_ = 0;  // of the unplaced blocks, or beyond
    std::int64_t nodes_ = 0;
};

}  // namespace

SHOAL_API std::int32_t shoal_layout_search(std::int64_t count, const std::int64_t* lower, const std::int64_t* upper,
                                           const std::int64_t* size, std::int64_t capacity, std::uint32_t rules,
                                           std::int64_t most_nodes, double seconds, const volatile std::int32_t* stop,
                                           std::int64_t* failures, std::int64_t* offsets) {
    const std::chrono::duration<double> left(std::min(seconds, kForEverSeconds));
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(left);
    // A section is a time that shares its blocks with no other: it begins with a block, after one has ended.
    std::vector<Event> events;
    for (std::int64_t i = 0; i < count; ++i) {
        events.push_back({lower[i], true, i});
        events.push_back({upper[i], false, i});
    }
    std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
        return a.time != b.time ? a.time < b.time : a.begins < b.begins;
    });
    std::vector<Item> items(count);
    int section = -1;
    bool ended = true;
    for (const Event& event : events) {
        if (event.begins && ended) ++section;
        ended = !event.begins;
        if (event.begins)
            items[event.item].first = section;
        else
            items[event.item] = {items[event.item].first, section + 1, size[event.item]};
    }
    Search search(std::move(items), section + 1, capacity, rules, most_nodes, deadline, stop, failures);
    return search.run(offsets);
}
