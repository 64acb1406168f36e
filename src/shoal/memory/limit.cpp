// A CPU allocator that counts the bytes in use and refuses to go past a limit, like the memory of a small device.
//
// It takes the place of torch's CPU allocator and hands every request on to it, so memory looks to the profiler as it
// always does. Sizes are those requested, as the profiler reports them.

#include <algorithm>
#include <atomic>
#include <array>
#include <cstdint>
#include <limits>
#include <mutex>
#include <thread>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

extern "C" void* PyGILState_GetThisThreadState();  // of Python, which is in the process; null if it is not its thread

namespace {

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

struct Block {
  std::int64_t nbytes;
  c10::Allocator* owner;
  std::int64_t generation;
  std::int64_t installation;
};

// Blocks by address, in shards so that threads seldom wait for one another.
struct Shard {
  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;
};

// What was allocated since one limit_start_fresh, up to the next. It says whose blocks count, so that no block which
// another thread allocates meanwhile is counted for two of them.
struct Generation {
  std::atomic<std::int64_t> number{0};
  std::atomic<std::int64_t> fresh{0};
  std::atomic<std::int64_t> fresh_peak{0};
  std::atomic<std::thread::id> counted{std::thread::id()};  // the thread that trains; all count if it is none
};

struct Counters {
  // Of the blocks of the present installation: those of an earlier one are to this one as if allocated by others.
  std::atomic<std::int64_t> installation{0};
  std::atomic<std::int64_t> live{0};
  std::atomic<std::int64_t> peak{0};
  std::atomic<std::int64_t> limit{kNoLimit};
  // Since the process began: how many requests were refused, the size of the last of them, and what was in use then.
  std::atomic<std::int64_t> refusals{0};
  std::atomic<std::int64_t> refused{0};
  std::atomic<std::int64_t> fresh_at_refusal{0};
  std::atomic<std::int64_t> generation{0};  // the number of the present one
  std::array<Generation, 64> generations;   // the last ones, by number; blocks of earlier ones are forgotten
  std::array<Shard, 16> shards;

  Generation& of(std::int64_t number) { return generations[static_cast<std::size_t>(number) % generations.size()]; }
  Generation& now() { return of(generation.load()); }

  Shard& shard(void* data) { return shards[(reinterpret_cast<std::uintptr_t>(data) >> 6) % shards.size()]; }
};

// Never destroyed: tensors may be freed while the process exits.
Counters& counters() {
  static auto* held = new Counters;
  return *held;
}

void raise_to(std::atomic<std::int64_t>& peak, std::int64_t nbytes) {
  std::int64_t now = peak.load();
  while (now < nbytes && !peak.compare_exchange_weak(now, nbytes)) {
  }
}

void forget(const Block& block) {
  Counters& c = counters();
  if (block.installation == c.installation.load()) c.live.fetch_sub(block.nbytes);
  if (block.generation < 0) return;
  Generation& generation = c.of(block.generation);
  if (block.generation == generation.number.load()) generation.fresh.fetch_sub(block.nbytes);
}

// Of Python's threads only the one that trains is counted, and those of Shoal, which say so: others load data or train
// models of their own. Threads that Python does not know work in the kernels of whoever counts.
thread_local bool works_for_steps = false;

bool counts_here(const Generation& generation) {
  const std::thread::id counted = generation.counted.load();
  if (counted == std::thread::id() || counted == std::this_thread::get_id() || works_for_steps) return true;
  return PyGILState_GetThisThreadState() == nullptr;
}

void reserve(std::int64_t nbytes, Generation* fresh) {
  Counters& c = counters();
  std::int64_t before = c.live.load();
  std::int64_t after;
  do {
    after = before + nbytes;
    const std::int64_t limit = c.limit.load();
    if (after > limit) {
      c.refused.store(nbytes);
      c.fresh_at_refusal.store(c.now().fresh.load());
      c.refusals.fetch_add(1);
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        after <= limit,
        "out of memory: ", nbytes, " bytes requested while ", before, " are in use and the limit is ", limit);
  } while (!c.live.compare_exchange_weak(before, after));
  raise_to(c.peak, after);
  if (fresh != nullptr) raise_to(fresh->fresh_peak, fresh->fresh.fetch_add(nbytes) + nbytes);
}

std::atomic<c10::Allocator*>& inner_allocator() {
  static std::atomic<c10::Allocator*> held{nullptr};
  return held;
}

void free_counted(void* data) {
  if (data == nullptr) return;
  Counters& c = counters();
  Block block{0, inner_allocator().load(), -1, -1};  // what was allocated before the limit was installed does not count
  {
    // Forgotten before it is freed: another thread may get the same address at once.
    Shard& shard = c.shard(data);
    std::lock_guard<std::mutex> lock(shard.mutex);
    const auto found = shard.blocks.find(data);
    if (found != shard.blocks.end()) {
      block = found->second;
      shard.blocks.erase(found);
    }
  }
  block.owner->raw_deallocate(data);
  forget(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    c10::Allocator* owner = inner_allocator().load();
    if (n == 0) return owner->allocate(0);
    const auto nbytes = static_cast<std::int64_t>(n);
    const std::int64_t number = counters().generation.load();
    Generation& generation = counters().of(number);
    const bool is_fresh = counts_here(generation);
    const Block block{nbytes, owner, is_fresh ? number : -1, counters().installation.load()};
    reserve(nbytes, is_fresh ? &generation : nullptr);
    void* data = nullptr;
    try {
      data = owner->raw_allocate(n);
    } catch (...) {
      forget(block);
      throw;
    }
    Shard& shard = counters().shard(data);
    {
      std::lock_guard<std::mutex> lock(shard.mutex);
      const auto [entry, fresh] = shard.blocks.try_emplace(data, block);
      if (!fresh) {  // raw_deallocate freed the earlier block while no limit was installed
        forget(entry->second);
        entry->second = block;
      }
    }
    // The context is the data pointer, as raw_deallocate asks.
    return {data, data, &free_counted, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }

  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

CountingAllocator& counting() {
  static auto* held = new CountingAllocator;
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

#define LIMIT_API extern "C" __attribute__((visibility("default")))

LIMIT_API void limit_install() {
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current == &counting()) return;
  inner_allocator().store(current);
  counters().installation.fetch_add(1);
  counters().live.store(0);
  replace_with(&counting());
}

LIMIT_API void limit_uninstall() {
  if (c10::GetCPUAllocator() == &counting()) replace_with(inner_allocator().load());
}

// A negative limit is none.
LIMIT_API void limit_set_bytes(std::int64_t limit) { counters().limit.store(limit < 0 ? kNoLimit : limit); }
LIMIT_API void limit_set_peak(std::int64_t peak) { counters().peak.store(peak); }
// Of this thread alone, or of all.
LIMIT_API void limit_start_fresh(int this_thread) {
  Counters& c = counters();
  const std::int64_t number = c.generation.load() + 1;
  Generation& next = c.of(number);
  next.number.store(number);
  next.fresh.store(0);
  next.fresh_peak.store(0);
  next.counted.store(this_thread ? std::this_thread::get_id() : std::thread::id());
  c.generation.store(number);
}
// From here on this thread is the one, if one is.
LIMIT_API void limit_count_this_thread() {
  Generation& now = counters().now();
  if (now.counted.load() != std::thread::id()) now.counted.store(std::this_thread::get_id());
}
LIMIT_API void limit_thread_works_for_steps() { works_for_steps = true; }
// Never less than what is in use.
LIMIT_API void limit_set_fresh_peak(std::int64_t peak) {
  Generation& now = counters().now();
  now.fresh_peak.store(std::max(peak, now.fresh.load()));
}
LIMIT_API std::int64_t limit_fresh_peak() { return counters().now().fresh_peak.load(); }
// Whether a block was given out since limit_start_fresh.
LIMIT_API int limit_is_fresh(void* data) {
  Counters& c = counters();
  Shard& shard = c.shard(data);
  std::lock_guard<std::mutex> lock(shard.mutex);
  const auto found = shard.blocks.find(data);
  return found != shard.blocks.end() && found->second.generation == c.generation.load();
}
LIMIT_API std::int64_t limit_refusals() { return counters().refusals.load(); }
LIMIT_API std::int64_t limit_refused() { return counters().refused.load(); }
LIMIT_API std::int64_t limit_fresh_at_refusal() { return counters().fresh_at_refusal.load(); }
LIMIT_API std::int64_t limit_live() { return counters().live.load(); }
LIMIT_API std::int64_t limit_peak() { return counters().peak.load(); }
