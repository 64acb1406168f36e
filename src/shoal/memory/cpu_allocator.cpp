// A caching allocator for the CPU: memory that is freed stays with the process, for the next tensor that fits in it.
//
// glibc maps a large block anew for each allocation and gives it back when it is freed; the system then fills its pages
// with zeros, one by one, while an op writes its result. Smaller blocks lie in a heap that grows by what falls between
// them. Here all of them lie in one range of addresses. A request gets the smallest hole that it fits in.
//
// No more memory is held than was in use at once, and a fiftieth: where a block fits in no hole and the range has to
// grow, holes elsewhere give as many pages back to the system. A page in which any block lies stays.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace {

constexpr std::size_t kSmallest = std::size_t{64} << 10;  // smaller blocks are left to the allocator beneath
constexpr std::size_t kGrain = 512;                       // blocks begin and end at multiples of it
constexpr std::size_t kChunk = std::size_t{2} << 20;      // memory is given back in these: a huge page
constexpr std::size_t kCommitted = std::size_t{64} << 20;  // addresses become writable in these
constexpr std::size_t kSlackChunks = 4;

constexpr std::size_t up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

struct Cache {
  std::mutex mutex;
  std::byte* base = nullptr;
  std::size_t span = 0;       // of the addresses
  std::size_t committed = 0;  // of them, writable
  std::size_t top = 0;        // no block lies behind it
  std::map<std::size_t, std::size_t> holes;  // offset → bytes, below top; never two side by side
  std::set<std::pair<std::size_t, std::size_t>> by_size;  // bytes, offset
  std::unordered_map<std::size_t, std::size_t> blocks;    // offset → bytes
  std::vector<bool> held;  // chunk → whether there may be memory behind it
  std::size_t held_chunks = 0;
  std::size_t live = 0;
  std::size_t most_live = 0;
  std::atomic<c10::Allocator*> beneath{nullptr};
  bool installed = false;           // another allocator may have taken our place since, and hand on to us
  std::atomic<bool> serves{false};  // not in a process that was forked
};

// Never destroyed: tensors may be freed while the process exits.
Cache& cache() {
  static auto* kept = new Cache;
  return *kept;
}

void add_hole(Cache& c, std::size_t offset, std::size_t nbytes) {
  c.holes.emplace(offset, nbytes);
  c.by_size.emplace(nbytes, offset);
}

std::map<std::size_t, std::size_t>::iterator drop_hole(Cache& c, std::map<std::size_t, std::size_t>::iterator hole) {
  c.by_size.erase({hole->second, hole->first});
  return c.holes.erase(hole);
}

// Gives memory behind the whole chunks of a range back to the system, `most` of them, the last ones first.
std::size_t give_back(Cache& c, std::size_t begin, std::size_t end, std::size_t most) {
  const std::size_t first = up(begin, kChunk) / kChunk;
  std::size_t given = 0;
  for (std::size_t at = end / kChunk; at > first && given < most; --at) {
    const std::size_t chunk = at - 1;
    if (!c.held[chunk] || madvise(c.base + chunk * kChunk, kChunk, MADV_DONTNEED) != 0) continue;
    c.held[chunk] = false;
    ++given;
  }
  c.held_chunks -= given;
  return given;
}

// Of what lies in no block: first behind the last one, then in the largest holes.
void give_back_unused(Cache& c, std::size_t most) {
  std::size_t given = give_back(c, c.top, c.committed, most);
  for (auto hole = c.by_size.rbegin(); hole != c.by_size.rend() && hole->first >= kChunk && given < most; ++hole) {
    given += give_back(c, hole->second, hole->second + hole->first, most - given);
  }
}

// Memory will be behind a new block: no more in all than was ever in use, and a fiftieth.
void hold(Cache& c, std::size_t offset, std::size_t nbytes) {
  const std::size_t end = up(offset + nbytes, kChunk) / kChunk;
  std::size_t fresh = 0;
  for (std::size_t chunk = offset / kChunk; chunk < end; ++chunk) {
    if (!c.held[chunk]) ++fresh;
    c.held[chunk] = true;
  }
  if (fresh == 0) return;
  c.held_chunks += fresh;
  const std::size_t allowed = up(c.most_live + c.most_live / 50, kChunk) / kChunk + kSlackChunks;
  if (c.held_chunks > allowed) give_back_unused(c, c.held_chunks - allowed);
}

bool commit(Cache& c, std::size_t end) {
  if (end <= c.committed) return true;
  if (end > c.span) return false;
  const std::size_t committed = std::min(up(end, kCommitted), c.span);
  if (mprotect(c.base + c.committed, committed - c.committed, PROT_READ | PROT_WRITE) != 0) return false;
  c.committed = committed;
  return true;
}

void* take(std::size_t asked) {
  Cache& c = cache();
  const std::size_t nbytes = up(asked, kGrain);
  std::lock_guard<std::mutex> lock(c.mutex);
  std::size_t offset = c.top;
  const auto fitting = c.by_size.lower_bound({nbytes, 0});
  if (fitting != c.by_size.end()) {
    const auto [hole_nbytes, hole_offset] = *fitting;
    offset = hole_offset;
    drop_hole(c, c.holes.find(offset));
    if (hole_nbytes > nbytes) add_hole(c, offset + nbytes, hole_nbytes - nbytes);
  } else {
    if (asked > c.span || !commit(c, offset + nbytes)) return nullptr;
    c.top += nbytes;
  }
  c.blocks.emplace(offset, nbytes);
  c.live += nbytes;
  c.most_live = std::max(c.most_live, c.live);
  hold(c, offset, nbytes);
  return c.base + offset;
}

// False where the block is not one of ours.
bool put_back(std::byte* address) {
  Cache& c = cache();
  if (address < c.base || address >= c.base + c.span) return false;
  c10::profiledCPUMemoryReporter().Delete(address);  // before another request may get the address
  std::lock_guard<std::mutex> lock(c.mutex);
  const auto block = c.blocks.find(static_cast<std::size_t>(address - c.base));
  if (block == c.blocks.end()) return true;
  std::size_t begin = block->first;
  std::size_t end = begin + block->second;
  c.live -= block->second;
  c.blocks.erase(block);
  auto next = c.holes.lower_bound(begin);
  if (next != c.holes.end() && next->first == end) {
    end += next->second;
    next = drop_hole(c, next);
  }
  if (next != c.holes.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      drop_hole(c, before);
    }
  }
  if (end == c.top) {
    c.top = begin;
  } else {
    add_hole(c, begin, end - begin);
  }
  return true;
}

void free_block(void* data) {
  if (data == nullptr || put_back(static_cast<std::byte*>(data))) return;
  cache().beneath.load()->raw_deallocate(data);
}

struct CachingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    Cache& c = cache();
    void* data = n >= kSmallest && c.serves.load() ? take(n) : nullptr;
    if (data == nullptr) return c.beneath.load()->allocate(n);
    c10::profiledCPUMemoryReporter().New(data, n);
    // The context is the data pointer, as raw_deallocate asks.
    return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

CachingAllocator& caching() {
  static auto* kept = new CachingAllocator;
  return *kept;
}

void replace_with(c10::Allocator* allocator) {
  // The lowest priority first, so that whoever comes after us can still replace us.
  for (const std::uint8_t priority : {0, 255}) {
    c10::SetCPUAllocator(allocator, priority);
    if (c10::GetCPUAllocator() == allocator) return;
  }
}

// Pages that are written after a fork are copied: those that nobody uses are not worth it.
void before_fork() {
  cache().mutex.lock();
  give_back_unused(cache(), cache().held_chunks);
}

void after_fork() { cache().mutex.unlock(); }

void in_child() {
  cache().serves.store(false);
  cache().mutex.unlock();
}

bool reserve(Cache& c) {
  const auto machine = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t span = up(2 * machine, kChunk);  // holes that gave their memory back still have their addresses
  void* got = mmap(nullptr, span + kChunk, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return false;
  const auto begin = reinterpret_cast<std::uintptr_t>(got);
  auto* base = reinterpret_cast<std::byte*>(up(begin, kChunk));
  madvise(base, span, MADV_HUGEPAGE);
  c.held.assign(span / kChunk, false);
  c.span = span;
  c.base = base;
  return pthread_atfork(&before_fork, &after_fork, &in_child) == 0;
}

}  // namespace

#define CACHE_API extern "C" __attribute__((visibility("default")))

// Takes the place of torch's allocator; in a forked process, again. False where that one cannot be handed on to, or
// there are no addresses to be had.
CACHE_API bool cpu_allocator_install() {
  Cache& c = cache();
  std::lock_guard<std::mutex> lock(c.mutex);
  if (!c.installed) {
    auto* current = c10::GetCPUAllocator();
    if (current->raw_deleter() == nullptr || (c.base == nullptr && !reserve(c))) return false;
    c.beneath.store(current);
    replace_with(&caching());
    c.installed = true;
  }
  c.serves.store(true);
  return true;
}

// What it gave out stays valid; new requests go to the allocator beneath until it is installed again.
CACHE_API void cpu_allocator_stop() { cache().serves.store(false); }

CACHE_API bool cpu_allocator_serves() { return cache().serves.load(); }

CACHE_API void cpu_allocator_give_back() {
  Cache& c = cache();
  std::lock_guard<std::mutex> lock(c.mutex);
  c.most_live = c.live;
  give_back_unused(c, c.held_chunks);
}

// Bytes in use, most of them at once, and bytes of memory held for them and for the next ones.
CACHE_API void cpu_allocator_bytes(std::int64_t* told) {
  Cache& c = cache();
  std::lock_guard<std::mutex> lock(c.mutex);
  told[0] = static_cast<std::int64_t>(c.live);
  told[1] = static_cast<std::int64_t>(c.most_live);
  told[2] = static_cast<std::int64_t>(c.held_chunks * kChunk);
}
