// What a CUDA memory pool asks its segments of: places inside one block of device memory, each of a planned size.
//
// Free of torch and of CUDA's headers: `arena_cuda.py` hands in cudaMalloc and cudaFree. A request is served where a
// place of exactly its size is free; any other goes to cudaMalloc and is counted. So nothing is ever overwritten.

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <sys/types.h>

namespace {

using Malloc = int (*)(void**, std::size_t);
using Free = int (*)(void*);

struct Place {
  std::int64_t offset;
  std::int64_t nbytes;
  bool taken;
};

struct Block {
  std::byte* base = nullptr;
  std::int64_t nbytes = 0;
  std::vector<Place> places;
  std::vector<std::int64_t> asked;  // sizes of all requests since the last plan, in their order
  std::int64_t departures = 0;
};

struct Blocks {
  std::mutex mutex;
  Malloc malloc = nullptr;
  Free free = nullptr;
  std::map<int, Block> by_device;
};

// Never destroyed: tensors may be freed while the process exits.
Blocks& blocks() {
  static auto* held = new Blocks;
  return *held;
}

}  // namespace

#define ARENA_API extern "C" __attribute__((visibility("default")))

ARENA_API void arena_cuda_use(Malloc malloc, Free free) {
  blocks().malloc = malloc;
  blocks().free = free;
}

// The two functions that torch calls, with the device made current. Null: there is no memory.
ARENA_API void* arena_cuda_alloc(ssize_t nbytes, int device, void* /*stream*/) {
  Blocks& all = blocks();
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    Block& block = all.by_device[device];
    block.asked.push_back(nbytes);
    for (Place& place : block.places) {
      if (place.taken || place.nbytes != nbytes) continue;
      place.taken = true;
      return block.base + place.offset;
    }
    if (!block.places.empty()) ++block.departures;
  }
  void* data = nullptr;
  return all.malloc(&data, static_cast<std::size_t>(nbytes)) == 0 ? data : nullptr;
}

ARENA_API void arena_cuda_free(void* data, ssize_t /*nbytes*/, int device, void* /*stream*/) {
  Blocks& all = blocks();
  auto* address = static_cast<std::byte*>(data);
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    Block& block = all.by_device[device];
    if (block.base != nullptr && address >= block.base && address < block.base + block.nbytes) {
      for (Place& place : block.places) {
        if (block.base + place.offset == address) place.taken = false;
      }
      return;
    }
  }
  all.free(data);
}

// One block of `count` places, back to back. 0, or cudaMalloc's error; -1 while a place of an earlier plan is taken.
ARENA_API int arena_cuda_plan(int device, std::int64_t count, const std::int64_t* sizes) {
  Blocks& all = blocks();
  std::lock_guard<std::mutex> lock(all.mutex);
  Block& block = all.by_device[device];
  for (const Place& place : block.places) {
    if (place.taken) return -1;
  }
  if (block.base != nullptr) all.free(block.base);
  block = {};
  std::vector<Place> places;
  std::int64_t nbytes = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    places.push_back({nbytes, sizes[i], false});
    nbytes += sizes[i];
  }
  if (nbytes == 0) return 0;
  void* base = nullptr;
  if (const int error = all.malloc(&base, static_cast<std::size_t>(nbytes)); error != 0) return error;
  block.base = static_cast<std::byte*>(base);
  block.nbytes = nbytes;
  block.places = std::move(places);
  return 0;
}

ARENA_API std::int64_t arena_cuda_departures(int device) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  return blocks().by_device[device].departures;
}

// How many requests there were since the last plan; their sizes go to `sizes` where it is not null.
ARENA_API std::int64_t arena_cuda_asked(int device, std::int64_t* sizes) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  const std::vector<std::int64_t>& asked = blocks().by_device[device].asked;
  for (std::size_t i = 0; sizes != nullptr && i < asked.size(); ++i) sizes[i] = asked[i];
  return static_cast<std::int64_t>(asked.size());
}
