// Which storages the ops of one thread read, from reads_start to reads_stop.
//
// PyTorch's own observer of ops (what its profiler is built on) hands over their inputs: no mode of dispatch is entered,
// so that what is compiled, and what other modes see, stays as it is.

#define NDEBUG  // as torch is built: without it RecordFunction has one member more
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

namespace {

struct Read {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::int64_t nbytes;  // of the tensors that were read, the storage's at most
};

std::mutex mutex;
std::unordered_map<c10::StorageImpl*, Read> reads;
at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
std::thread::id thread;
std::atomic<int> paused{0};

void note(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const c10::Storage& storage = tensor.storage();
  // A fake tensor, as of a graph that is traced meanwhile: it holds no bytes, and its size may be a symbol.
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || storage.sym_nbytes().is_heap_allocated()) return;
  const auto whole = static_cast<std::int64_t>(storage.nbytes());
  const auto own = std::min(whole, static_cast<std::int64_t>(tensor.numel() * tensor.element_size()));
  std::lock_guard<std::mutex> lock(mutex);
  auto found = reads.find(storage.unsafeGetStorageImpl());
  if (found == reads.end()) {
    auto weak = storage.getWeakStorageImpl();
    reads.emplace(storage.unsafeGetStorageImpl(), Read{std::move(weak), own});
  } else {
    found->second.nbytes = std::max(found->second.nbytes, own);
  }
}

void note(const c10::IValue& value) {
  if (value.isTensor()) {
    note(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) note(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) note(one);
  }
}

// A view reads nothing: what reads the view is noted, and of how many bytes.
bool makes_a_view(const at::RecordFunction& op) {
  const auto schema = op.operator_schema();
  if (!schema) return false;
  for (const c10::Argument& result : schema->returns()) {
    if (result.alias_info() == nullptr || result.alias_info()->isWrite()) return false;
  }
  return !schema->returns().empty();
}

std::unique_ptr<at::ObserverContext> before_op(const at::RecordFunction& op) {
  if (std::this_thread::get_id() == thread && !paused.load() && !makes_a_view(op))
    for (const c10::IValue& value : op.inputs()) note(value);
  return nullptr;
}

}  // namespace

#define READS_API extern "C" __attribute__((visibility("default")))

READS_API void reads_start() {
  if (handle != at::INVALID_CALLBACK_HANDLE) return;
  thread = std::this_thread::get_id();
  {
    std::lock_guard<std::mutex> lock(mutex);
    reads.clear();
  }
  handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&before_op).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

// Ops that run until it is called with -1 are not noted.
READS_API void reads_pause(int by) { paused.fetch_add(by); }

READS_API void reads_stop() {
  if (handle != at::INVALID_CALLBACK_HANDLE) at::removeCallback(handle);
  handle = at::INVALID_CALLBACK_HANDLE;
}

// What was read and is still there, each as: key of the storage, bytes that were read, address, type and index of the
// device. Returns how many there are; fills in `capacity` of them at most and forgets all where they fit.
READS_API std::int64_t reads_take(std::int64_t* out, std::int64_t capacity) {
  std::lock_guard<std::mutex> lock(mutex);
  std::int64_t count = 0;
  for (auto& [key, read] : reads) {
    const auto storage = read.storage.lock();
    if (!storage || !storage->nbytes()) continue;
    if (count < capacity) {
      const c10::Device device = storage->device();
      std::int64_t* row = out + 5 * count;
      row[0] = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(key));
      row[1] = read.nbytes;
      row[2] = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(storage->data()));
      row[3] = static_cast<std::int64_t>(device.type());
      row[4] = device.index();
    }
    ++count;
  }
  if (count <= capacity) reads.clear();
  return count;
}
