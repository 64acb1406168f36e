// The places of transfers of one choice of storages: shoal.planners.transfer_places, which says what they are, and
// shoal.core.schedule and simulate for steps without transfers, over flat arrays. Sums are added in the same order, so
// that every result has the bits of theirs.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "shoal_native.h"

namespace {

using Index = std::int64_t;
constexpr Index kNoLimit = Index{1} << 62;  // bytes

struct Range {
    const Index *first, *last;
    const Index* begin() const { return first; }
    const Index* end() const { return last; }
};

struct Run {
    Index op;
    bool again;
    Range writes;
    Index takes_over = -1;
    std::vector<Index> frees{};
};

// An op run once more for a backward op, and the storages that are asked of it: `rerun[begin:end]`.
struct Rerun {
    Index before, op, storage;
};

class Schedule {
public:
    Schedule(const ShoalTransferStep& step, const std::uint8_t* kept) : step_(step) {
        recompute(kept);
        execute();
        free();
    }

    const std::vector<Run>& runs() const { return runs_; }

    // The op as it runs: the second runs follow the first ones in each array.
    Index number(const Run& run) const { return run.again ? step_.ops + run.op : run.op; }

    Range reads(Index number) const {
        return {step_.reads + step_.reads_begin[number], step_.reads + step_.reads_begin[number + 1]};
    }

    Range writes(Index number) const {
        return {step_.writes + step_.writes_begin[number], step_.writes + step_.writes_begin[number + 1]};
    }

    // Bytes in use during each run.
    std::vector<Index> totals() const {
        std::vector<Index> found;
        found.reserve(runs_.size());
        Index in_use = step_.resident_bytes;
        for (const Run& run : runs_) {
            const Index op = number(run);
            for (Index s : run.writes) in_use += step_.nbytes[s];
            if (run.takes_over >= 0) in_use -= step_.nbytes[run.takes_over];
            Index dropped = 0;
            if (run.again)
                for (Index s : writes(op))
                    if (std::find(run.writes.begin(), run.writes.end(), s) == run.writes.end()) dropped += step_.nbytes[s];
            found.push_back(in_use + step_.workspace_bytes[op] + dropped);
            for (Index s : run.frees)
                if (s != run.takes_over) in_use -= step_.nbytes[s];
        }
        return found;
    }

    // How long the device waits for the host before each run.
    std::vector<double> waits() const {
        std::vector<double> found;
        found.reserve(runs_.size());
        double now = 0, launched = 0;
        for (const Run& run : runs_) {
            const Index op = number(run);
            launched += step_.launch_seconds[op];
            found.push_back(std::max(0.0, launched - now));
            now += found.back() + step_.seconds[op];
        }
        return found;
    }

private:
    // What is given up is computed again right before the first op that needs it, as `just_in_time` has it.
    void recompute(const std::uint8_t* kept) {
        std::vector<std::uint8_t> given_up(step_.storages), back(step_.storages, 0);
        for (Index s = 0; s < step_.storages; ++s) given_up[s] = step_.may_be_given_up[s] && !kept[s];
        std::vector<Index> wanted;
        for (Index op = step_.forward; op < step_.ops; ++op) {
            const std::size_t begin = reruns_.size();
            for (Index s : reads(op))
                if (given_up[s]) wanted.push_back(s);
            while (!wanted.empty()) {
                const Index s = wanted.back();
                wanted.pop_back();
                if (back[s]) continue;
                back[s] = 1;
                reruns_.push_back({op, step_.producer[s], s});
                for (Index read : reads(step_.ops + step_.producer[s]))
                    if (given_up[read]) wanted.push_back(read);
            }
            std::sort(reruns_.begin() + begin, reruns_.end(), [](const Rerun& a, const Rerun& b) {
                return a.op != b.op ? a.op < b.op : a.storage < b.storage;
            });
        }
        asked_.reserve(reruns_.size());
        for (const Rerun& rerun : reruns_) asked_.push_back(rerun.storage);
    }

    void execute() {
        runs_.reserve(step_.ops + reruns_.size());
        std::size_t next = 0;
        for (Index op = 0; op < step_.ops; ++op) {
            while (next < reruns_.size() && reruns_[next].before == op) {
                const std::size_t begin = next;
                while (next < reruns_.size() && reruns_[next].before == op && reruns_[next].op == reruns_[begin].op) ++next;
                runs_.push_back({reruns_[begin].op, true, {asked_.data() + begin, asked_.data() + next}});
            }
            runs_.push_back({op, false, writes(op)});
        }
    }

    // Backwards: a storage dies in the run behind which nothing reads it.
    void free() {
        const Index count = static_cast<Index>(runs_.size());
        std::vector<Index> returns(step_.storages, count);
        for (Index place = count - 1; place >= step_.forward; --place)
            if (runs_[place].again)
                for (Index s : runs_[place].writes) returns[s] = place;
        std::vector<std::uint8_t> read_later(step_.storages, 0);
        for (Index place = count - 1; place >= 0; --place) {
            Run& run = runs_[place];
            const Index op = number(run);
            const auto die = [&](Index s) {
                if (std::find(run.frees.begin(), run.frees.end(), s) == run.frees.end()) run.frees.push_back(s);
            };
            for (Index s : run.writes) {
                if (read_later[s])
                    read_later[s] = 0;
                else if (!step_.stays[s])
                    die(s);
            }
            const Range all = writes(op);
            const bool first_is_asked =
                all.first != all.last && std::find(run.writes.begin(), run.writes.end(), *all.first) != run.writes.end();
            for (Index s : reads(op)) {
                if (read_later[s] || step_.stays[s]) continue;
                die(s);
                if (s != step_.overwrites[op] || !first_is_asked) continue;
                const bool held = step_.producer[s] >= 0 && step_.producer[s] < step_.forward;
                if (place < step_.forward || !held || place >= returns[s]) run.takes_over = s;
            }
            for (Index s : reads(op)) read_later[s] = 1;
        }
    }

    const ShoalTransferStep& step_;
    std::vector<Rerun> reruns_;
    std::vector<Index> asked_;  // by `reruns_`
    std::vector<Run> runs_;
};

struct Units {
    const double* seconds;
    const Index* room_bytes;
    Index count;
};

// One storage on its way in one direction, units counted in that direction's time.
struct Copy {
    Index storage, nbytes;
    double seconds;
    Index arrives, stays;
    double early;
};

struct Carried {
    double seconds = 0;
    Index excess_bytes = 0;
};

// `_Way.carry`; ends: storage -> unit at whose end it is gone.
Carried carry(const Units& units, const std::vector<Copy>& queue, bool overlaps, Index* ends) {
    std::vector<std::pair<double, const Copy*>> waiting;
    Index freed_bytes = 0;
    Carried found;
    double link_until = 0;
    double& now = found.seconds;
    std::size_t arrived = 0;
    for (Index number = 0; number < units.count; ++number) {
        Index short_bytes = -units.room_bytes[number] - freed_bytes;
        while (short_bytes > 0) {
            const auto ready = std::find_if(waiting.begin(), waiting.end(),
                                            [&](const auto& entry) { return entry.second->stays < number; });
            if (ready == waiting.end()) {
                found.excess_bytes += short_bytes;
                break;
            }
            const auto [done, copy] = *ready;
            waiting.erase(ready);
            ends[copy->storage] = number - 1;
            freed_bytes += copy->nbytes;
            short_bytes -= copy->nbytes;
            now = std::max(now, done);
        }
        now += units.seconds[number];
        while (arrived < queue.size() && queue[arrived].arrives == number) {
            const Copy& copy = queue[arrived++];
            const double begin = overlaps ? now - copy.early : now;
            link_until = std::max(begin, link_until) + copy.seconds;
            waiting.emplace_back(link_until, &copy);
            if (!overlaps) now = link_until;
        }
        if (!waiting.empty() && waiting.front().first <= now) {
            const auto gone = [&](const auto& entry) {
                if (entry.first > now || entry.second->stays > number) return false;
                ends[entry.second->storage] = number;
                freed_bytes += entry.second->nbytes;
                return true;
            };
            waiting.erase(std::remove_if(waiting.begin(), waiting.end(), gone), waiting.end());
        }
    }
    for (const auto& [done, copy] : waiting) {
        ends[copy->storage] = units.count - 1;
        now = std::max(now, done);
    }
    return found;
}

void find_places(ShoalTransferPlaces& out) {
    const ShoalTransferStep& step = *out.step;
    const Schedule schedule(step, out.kept);
    const std::vector<Run>& runs = schedule.runs();
    const std::vector<Index> totals = schedule.totals();
    const std::vector<double> waits = schedule.waits();
    const auto room = [&](std::size_t place) { return out.budget_bytes ? out.budget_bytes - totals[place] : kNoLimit; };
    for (Index op = 0; op < step.forward; ++op) {
        out.forward_seconds[op] = waits[op] + step.seconds[op];
        out.forward_room_bytes[op] = room(op);
    }
    struct Read {
        Index storage, unit, run;
        double begin_seconds;
    };
    std::vector<Read> read;
    std::vector<Index> first_run(step.storages, -1), first_unit(step.storages, -1);
    std::vector<std::uint8_t> too_late(step.storages, 0);  // read before the backward pass begins
    out.backward = out.between = 0;
    double seconds = 0;
    Index min_room = kNoLimit;
    for (std::size_t place = step.forward; place < runs.size(); ++place) {
        const Run& run = runs[place];
        const Index op = schedule.number(run);
        seconds += waits[place];
        for (Index s : schedule.reads(op)) read.push_back({s, out.backward, static_cast<Index>(place), seconds});
        seconds += step.seconds[op];
        min_room = std::min(min_room, room(place));
        if (run.again) continue;
        if (step.is_backward[run.op]) {
            for (const Read& one : read)
                if (first_run[one.storage] < 0) {
                    first_run[one.storage] = one.run;
                    first_unit[one.storage] = one.unit;
                    out.early_seconds[one.storage] = one.begin_seconds;
                }
            out.backward_op[out.backward] = run.op;
            out.backward_seconds[out.backward] = seconds;
            out.backward_room_bytes[out.backward++] = min_room;
        } else {
            for (const Read& one : read) too_late[one.storage] = 1;
            out.between_seconds[out.between] = seconds;
            out.between_room_bytes[out.between++] = min_room;
        }
        seconds = 0;
        min_room = kNoLimit;
        read.clear();
    }
    std::reverse(out.backward_op, out.backward_op + out.backward);
    std::reverse(out.backward_seconds, out.backward_seconds + out.backward);
    std::reverse(out.backward_room_bytes, out.backward_room_bytes + out.backward);
    std::vector<Index> back;
    for (Index s = 0; s < step.storages; ++s) {
        out.can_leave[s] = step.may_leave[s] && first_run[s] >= 0 && !too_late[s];
        if (!out.can_leave[s]) continue;
        out.back_unit[s] = out.backward - 1 - first_unit[s];
        back.push_back(s);
    }
    std::sort(back.begin(), back.end(), [&](Index a, Index b) {
        return first_run[a] != first_run[b] ? first_run[a] > first_run[b] : a > b;
    });
    out.returning = static_cast<Index>(back.size());
    std::copy(back.begin(), back.end(), out.back);
}

void place(ShoalTransferPlaced& out) {
    const ShoalTransferPlaces& places = *out.places;
    const ShoalTransferStep& step = *places.step;
    std::vector<Copy> there, back;
    const auto is_wanted = [&](Index s) { return out.wanted[s] && places.can_leave[s]; };
    for (Index i = 0; i < step.written_count; ++i) {
        const Index s = step.written[i];
        if (!is_wanted(s)) continue;
        there.push_back({s, step.nbytes[s], step.to_host_seconds[s], step.producer[s], step.last_forward_reader[s], 0.0});
    }
    for (Index i = 0; i < places.returning; ++i) {
        const Index s = places.back[i], unit = places.back_unit[s];
        if (is_wanted(s))
            back.push_back({s, step.nbytes[s], step.to_device_seconds[s], unit, unit, places.early_seconds[s]});
    }
    std::fill(out.released, out.released + step.storages, Index{-1});
    std::fill(out.fetched, out.fetched + step.storages, Index{-1});
    const bool overlaps = step.overlaps;
    const Carried left =
        carry({places.forward_seconds, places.forward_room_bytes, step.forward}, there, overlaps, out.released);
    const Carried came =
        carry({places.backward_seconds, places.backward_room_bytes, places.backward}, back, overlaps, out.fetched);
    Index away_bytes = 0;
    out.host_bytes = 0;
    for (const Copy& copy : there) {
        away_bytes += copy.nbytes;
        out.host_bytes += step.host_bytes[copy.storage];
        out.fetched[copy.storage] = places.backward_op[out.fetched[copy.storage]];
    }
    out.excess_bytes = left.excess_bytes;
    double between_seconds = 0;
    for (Index i = 0; i < places.between; ++i) {
        out.excess_bytes += std::max(Index{0}, -places.between_room_bytes[i] - away_bytes);
        between_seconds += places.between_seconds[i];
    }
    out.excess_bytes += came.excess_bytes;
    out.seconds = left.seconds + between_seconds + came.seconds;
}

}  // namespace

SHOAL_API std::int32_t shoal_transfer_places(ShoalTransferPlaces* places) {
    try {
        find_places(*places);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

SHOAL_API std::int32_t shoal_transfer_place(ShoalTransferPlaced* placed) {
    try {
        place(*placed);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
