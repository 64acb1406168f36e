// A CPU allocator that serves the allocations of a training step at planned addresses inside one block of memory.
//
// A step makes the same sequence of allocations every time. While a step is recorded, requests go to the allocator
// beneath and their sizes and deaths are noted. While it is replayed, the k-th request gets its planned address if it
// has its planned size and no block that is still in use lies there. Everything else goes to the allocator beneath: so
// nothing is ever overwritten, whatever the plan says. Only the thread that began the step takes part; memory may be
// freed by any thread. `arena.py` makes the plans.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace {

constexpr std::int64_t kElsewhere = -1;  // the offset of a request that is not the arena's to serve
constexpr std::int64_t kAlive = -1;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

// What one recorded step after another asked for. Time is counted in requests since the recording began.
struct Recording {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> died;  // before which request each was freed, kAlive if it was not yet
};

struct Plan {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> offsets;
};

struct Sequence {
  std::shared_ptr<Recording> recording = std::make_shared<Recording>();
  Plan plan;
};

// The first request of a step that was not served as planned.
struct Departure {
  std::int64_t count = 0;
  std::int64_t request = 0;
  std::int64_t asked_bytes = 0;
  std::int64_t planned_bytes = 0;  // as many as asked: the place was taken; -1: the plan has no such request
};

struct Arena {
  std::byte* base = nullptr;
  std::size_t nbytes = 0;
  std::size_t most_nbytes = 0;  // of its addresses: it may grow so far where it is
  std::map<std::int64_t, std::int64_t> live;  // offset → end, of all blocks in use
  std::vector<Sequence> sequences;
  std::size_t current = 0;
  bool replays = false;
  std::size_t next = 0;  // request of the step
  std::int64_t served = 0;
  Departure departure;
  bool closed = false;
};

struct Recorded {
  c10::Allocator* owner;
  std::shared_ptr<Recording> recording;
  std::size_t place;
};

// One mutex for all: a step's thread is nearly always the only one that takes it.
struct Arenas {
  std::mutex mutex;
  std::map<std::byte*, Arena*> by_base;
  std::unordered_map<void*, Recorded> recorded;
  std::atomic<c10::Allocator*> beneath{nullptr};
};

// Never destroyed: tensors may be freed while the process exits.
Arenas& arenas() {
  static auto* held = new Arenas;
  return *held;
}

thread_local Arena* stepping = nullptr;

void unmap(Arena& arena) {
  if (arena.base == nullptr) return;
  arenas().by_base.erase(arena.base);
  munmap(arena.base, arena.most_nbytes);
  arena.base = nullptr;
  arena.nbytes = arena.most_nbytes = 0;
}

// Addresses without memory, from a huge page's beginning. Null, and errno, where they cannot be had.
std::byte* addresses(std::size_t nbytes) {
  const std::size_t mapped = nbytes + kHugePage;
  void* got = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(got);
  const std::size_t before = (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) % kHugePage;
  if (before > 0) munmap(begin, before);
  munmap(begin + before + nbytes, mapped - before - nbytes);
  return begin + before;
}

// Memory behind the addresses from `nbytes` up to `wanted`, each page written once.
bool commit(Arena& arena, std::size_t wanted, std::size_t page) {
  if (mprotect(arena.base, wanted, PROT_READ | PROT_WRITE) != 0) return false;
#ifdef MADV_HUGEPAGE
  madvise(arena.base, wanted, MADV_HUGEPAGE);
#endif
  for (std::size_t at = arena.nbytes; at < wanted; at += page) *reinterpret_cast<volatile char*>(arena.base + at) = 0;
  arena.nbytes = wanted;
  return true;
}

bool is_free(const Arena& arena, std::int64_t begin, std::int64_t end) {
  const auto after = arena.live.lower_bound(begin);
  if (after != arena.live.end() && after->first < end) return false;
  return after == arena.live.begin() || std::prev(after)->second <= begin;
}

void depart(Arena& arena, std::int64_t asked_bytes, std::int64_t planned_bytes) {
  Departure& departure = arena.departure;
  if (departure.count++ > 0) return;
  departure.request = static_cast<std::int64_t>(arena.next);
  departure.asked_bytes = asked_bytes;
  departure.planned_bytes = planned_bytes;
}

// The planned address of the step's next request, or null. A request that was not expected does not move the sequence
// on, so a step that makes one more of them meets its plan again.
std::byte* planned_address(Arena& arena, std::int64_t nbytes) {
  const Plan& plan = arena.sequences[arena.current].plan;
  if (arena.next >= plan.sizes.size() || plan.sizes[arena.next] != nbytes) {
    depart(arena, nbytes, arena.next < plan.sizes.size() ? plan.sizes[arena.next] : -1);
    return nullptr;
  }
  const std::int64_t offset = plan.offsets[arena.next];
  std::byte* address = nullptr;
  if (offset != kElsewhere) {
    const std::int64_t end = offset + nbytes;
    if (arena.base != nullptr && end <= static_cast<std::int64_t>(arena.nbytes) && is_free(arena, offset, end)) {
      arena.live.emplace(offset, end);
      address = arena.base + offset;
      ++arena.served;
    } else {
      depart(arena, nbytes, nbytes);
    }
  }
  ++arena.next;
  return address;
}

void free_block(void* data) {
  if (data == nullptr) return;
  auto* address = static_cast<std::byte*>(data);
  Arenas& all = arenas();
  c10::Allocator* owner = nullptr;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    auto found = all.by_base.upper_bound(address);
    if (found != all.by_base.begin() && address < std::prev(found)->first + std::prev(found)->second->nbytes) {
      Arena& arena = *std::prev(found)->second;
      c10::profiledCPUMemoryReporter().Delete(data);  // before another request may get the address
      arena.live.erase(address - arena.base);
      if (arena.closed && arena.live.empty()) {
        unmap(arena);
        delete &arena;
      }
      return;
    }
    owner = all.beneath.load();
    const auto noted = all.recorded.find(data);
    if (noted != all.recorded.end()) {
      Recording& recording = *noted->second.recording;
      recording.died[noted->second.place] = static_cast<std::int64_t>(recording.sizes.size());
      owner = noted->second.owner;
      all.recorded.erase(noted);
    }
  }
  owner->raw_deallocate(data);
}

struct ReplayAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    Arenas& all = arenas();
    c10::Allocator* beneath = all.beneath.load();
    Arena* arena = stepping;
    if (n == 0 || arena == nullptr) return beneath->allocate(n);
    if (arena->replays) {
      std::byte* address = nullptr;
      {
        std::lock_guard<std::mutex> lock(all.mutex);
        address = planned_address(*arena, static_cast<std::int64_t>(n));
      }
      if (address == nullptr) return beneath->allocate(n);
      c10::profiledCPUMemoryReporter().New(address, n);
      return counted(address);
    }
    void* data = beneath->raw_allocate(n);
    std::lock_guard<std::mutex> lock(all.mutex);
    const auto& recording = arena->sequences[arena->current].recording;
    all.recorded.insert_or_assign(data, Recorded{beneath, recording, recording->sizes.size()});
    recording->sizes.push_back(static_cast<std::int64_t>(n));
    recording->died.push_back(kAlive);
    return counted(data);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }

 private:
  // The context is the data pointer, as raw_deallocate asks.
  static c10::DataPtr counted(void* data) { return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)}; }
};

ReplayAllocator& replaying() {
  static auto* held = new ReplayAllocator;
  return *held;
}

void replace_with(c10::Allocator* allocator) {
  // The lowest priority first, so that whoever comes after us can still replace us.
  for (const std::uint8_t priority : {0, 255}) {
    c10::SetCPUAllocator(allocator, priority);
    if (c10::GetCPUAllocator() == allocator) return;
  }
}

}  // namespace

#define ARENA_API extern "C" __attribute__((visibility("default")))

// Takes the place of torch's allocator and hands on to it. False where that one cannot be handed on to.
ARENA_API bool arena_install() {
  auto* allocator = c10::GetCPUAllocator();
  if (allocator == &replaying()) return true;
  if (allocator->raw_deleter() == nullptr) return false;
  arenas().beneath.store(allocator);
  replace_with(&replaying());
  return true;
}

ARENA_API void arena_uninstall() {
  if (c10::GetCPUAllocator() == &replaying()) replace_with(arenas().beneath.load());
}

ARENA_API void* arena_open() { return new Arena; }

// Gives the memory back, now or when the last tensor in it is freed.
ARENA_API void arena_close(void* handle) {
  auto* arena = static_cast<Arena*>(handle);
  std::lock_guard<std::mutex> lock(arenas().mutex);
  arena->closed = true;
  if (!arena->live.empty()) return;
  unmap(*arena);
  delete arena;
}

// Makes the block at least so large. Returns 0; EBUSY where it had to move while something lies in it; else why there
// is no memory.
ARENA_API int arena_reserve(void* handle, std::int64_t nbytes) {
  Arena& arena = *static_cast<Arena*>(handle);
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t wanted = (static_cast<std::size_t>(nbytes) + page - 1) / page * page;
  std::lock_guard<std::mutex> lock(arenas().mutex);
  if (wanted <= arena.nbytes) return 0;
  if (wanted > arena.most_nbytes) {
    if (!arena.live.empty()) return EBUSY;
    unmap(arena);
    const std::size_t machine = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * page;
    for (const std::size_t most : {std::max(wanted, machine), wanted}) {  // the first may pass a limit of the process
      arena.base = addresses(most);
      arena.most_nbytes = most;
      if (arena.base != nullptr) break;
    }
    if (arena.base == nullptr) {
      arena.most_nbytes = 0;
      return errno;
    }
    arenas().by_base.emplace(arena.base, &arena);
  }
  return commit(arena, wanted, page) ? 0 : errno;
}

ARENA_API std::int64_t arena_add_sequence(void* handle) {
  Arena& arena = *static_cast<Arena*>(handle);
  std::lock_guard<std::mutex> lock(arenas().mutex);
  arena.sequences.emplace_back();
  return static_cast<std::int64_t>(arena.sequences.size()) - 1;
}

// The step of this thread begins. False where one runs already.
ARENA_API bool arena_begin(void* handle, std::int64_t sequence, bool replays) {
  if (stepping != nullptr) return false;
  auto* arena = static_cast<Arena*>(handle);
  std::lock_guard<std::mutex> lock(arenas().mutex);
  arena->current = static_cast<std::size_t>(sequence);
  arena->replays = replays;
  arena->next = 0;
  arena->served = 0;
  arena->departure = {};
  stepping = arena;
  return true;
}

// The step of this thread is over. `told` gets what was served, how many requests departed, and of the first of those
// its place, its bytes and the planned bytes. False where the step was begun on another thread.
ARENA_API bool arena_end(void* handle, std::int64_t* told) {
  if (stepping != handle) return false;
  Arena& arena = *stepping;
  stepping = nullptr;
  std::lock_guard<std::mutex> lock(arenas().mutex);
  const Departure& departure = arena.departure;
  const std::int64_t values[] = {
      arena.served, departure.count, departure.request, departure.asked_bytes, departure.planned_bytes};
  std::copy(std::begin(values), std::end(values), told);
  return true;
}

ARENA_API std::int64_t arena_recorded(void* handle, std::int64_t sequence) {
  std::lock_guard<std::mutex> lock(arenas().mutex);
  return static_cast<std::int64_t>(static_cast<Arena*>(handle)->sequences[sequence].recording->sizes.size());
}

// Copies what was recorded; both arrays have `arena_recorded` entries.
ARENA_API void arena_recording(void* handle, std::int64_t sequence, std::int64_t* sizes, std::int64_t* died) {
  std::lock_guard<std::mutex> lock(arenas().mutex);
  const Recording& recording = *static_cast<Arena*>(handle)->sequences[sequence].recording;
  std::copy(recording.sizes.begin(), recording.sizes.end(), sizes);
  std::copy(recording.died.begin(), recording.died.end(), died);
}

// Forgets what was recorded; what of it is still alive is freed as ever.
ARENA_API void arena_forget(void* handle, std::int64_t sequence) {
  std::lock_guard<std::mutex> lock(arenas().mutex);
  static_cast<Arena*>(handle)->sequences[sequence].recording = std::make_shared<Recording>();
}

// A negative offset leaves the request to the allocator beneath.
ARENA_API void arena_plan(
    void* handle, std::int64_t sequence, std::int64_t count, const std::int64_t* sizes, const std::int64_t* offsets) {
  std::lock_guard<std::mutex> lock(arenas().mutex);
  Plan& plan = static_cast<Arena*>(handle)->sequences[sequence].plan;
  plan.sizes.assign(sizes, sizes + count);
  plan.offsets.assign(offsets, offsets + count);
}
