// The CUDA runtime of a device that is not there: memory, streams and events are handles, copies are memcpy, and a
// launched kernel does nothing. Preloaded, it is found before libcudart. STANDIN_BYTES is the device's memory.
#define _GNU_SOURCE
#include "standin.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#undef cudaGetDeviceProperties

// Larger contents are not copied from tensor to tensor, nor filled: no kernel has written them and none reads them.
#define LARGEST_COPY_BYTES ((size_t)64 << 10)
#define LARGEST_FILL_BYTES ((size_t)1 << 20)

enum kind { DEVICE, PINNED, REGISTERED };

struct region {
  char *start;
  size_t nbytes;
  enum kind kind;
  struct region *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct region *regions;
static struct standin_counts counts;
static __thread int current_device;
EXPORT int standin_check(const char *name, void *on);

EXPORT void standin_read(struct standin_counts *out) {
  pthread_mutex_lock(&lock);
  *out = counts;
  pthread_mutex_unlock(&lock);
}

EXPORT void standin_reset_peak(void) {
  pthread_mutex_lock(&lock);
  counts.peak_bytes = counts.used_bytes;
  pthread_mutex_unlock(&lock);
}

// Expandable segments take their memory from the driver, which counts here too. Returns 0 where there is none left.
EXPORT int standin_take(long nbytes) {
  pthread_mutex_lock(&lock);
  int fits = counts.used_bytes + nbytes <= standin_setting("STANDIN_BYTES", 80L << 30);
  if (fits) {
    counts.used_bytes += nbytes;
    if (counts.used_bytes > counts.peak_bytes) counts.peak_bytes = counts.used_bytes;
  }
  pthread_mutex_unlock(&lock);
  return fits;
}

// A CUDA graph: how many kernels and copies were captured, of which a replay does none.
struct CUgraph_st {
  long kernels, copies;
};

// A stream holds when it is done, and the graph that it captures into.
struct CUstream_st {
  double until_ms;
  struct CUgraph_st *capturing;
  unsigned long long capture_id;
  int device;
};

static __thread cudaStream_t captured_here;  // the stream that this thread captures

static struct CUgraph_st *capturing(cudaStream_t stream) { return (uintptr_t)stream > 2 ? stream->capturing : NULL; }

// A kernel is launched; one of cuBLAS's or cuDNN's on the stream that its thread captures, if it does.
EXPORT void standin_count_launch(void) { standin_count_launch_on(captured_here); }
EXPORT void standin_count_launch_on(void *stream) {
  struct CUgraph_st *graph = capturing(stream);
  __atomic_add_fetch(graph ? &graph->kernels : &counts.launches, 1, __ATOMIC_RELAXED);
}

EXPORT long standin_setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

static struct region *region_of(const void *address) {
  const char *at = address;
  struct region *found = regions;
  while (found && !(at >= found->start && at < found->start + found->nbytes)) found = found->next;
  return found;
}

static void *map(size_t nbytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  return mmap(NULL, nbytes ? nbytes : 1, PROT_READ | PROT_WRITE, flags, -1, 0);
}

static void add(void *start, size_t nbytes, enum kind kind) {
  struct region *made = malloc(sizeof *made);
  *made = (struct region){start, nbytes, kind, regions};
  regions = made;
}

// Frees the region that begins there; whether there was one of that kind.
static int drop(void *start, enum kind kind) {
  struct region **link = &regions;
  while (*link && !((*link)->start == start && (*link)->kind == kind)) link = &(*link)->next;
  if (!*link) return 0;
  struct region *found = *link;
  *link = found->next;
  if (kind == DEVICE) counts.used_bytes -= found->nbytes;
  if (kind != REGISTERED) munmap(found->start, found->nbytes ? found->nbytes : 1);
  free(found);
  return 1;
}

// Memory

EXPORT cudaError_t cudaMalloc(void **out, size_t nbytes) {
  if (!standin_take(nbytes)) return cudaErrorMemoryAllocation;
  void *start = map(nbytes);
  if (start == MAP_FAILED) {
    standin_take(-(long)nbytes);
    return cudaErrorMemoryAllocation;
  }
  pthread_mutex_lock(&lock);
  counts.mallocs++;
  add(start, nbytes, DEVICE);
  pthread_mutex_unlock(&lock);
  *out = start;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void *start) {
  if (!start) return cudaSuccess;
  pthread_mutex_lock(&lock);
  counts.frees++;
  int found = drop(start, DEVICE);
  pthread_mutex_unlock(&lock);
  return found ? cudaSuccess : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
  *all = standin_setting("STANDIN_BYTES", 80L << 30);
  *left = *all - counts.used_bytes;
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void **out, size_t nbytes, unsigned flags) {
  void *start = map(nbytes);
  if (start == MAP_FAILED) return cudaErrorMemoryAllocation;
  pthread_mutex_lock(&lock);
  add(start, nbytes, PINNED);
  pthread_mutex_unlock(&lock);
  *out = start;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void *start) {
  pthread_mutex_lock(&lock);
  int found = drop(start, PINNED);
  pthread_mutex_unlock(&lock);
  return found ? cudaSuccess : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaHostRegister(void *start, size_t nbytes, unsigned flags) {
  char *end = (char *)start + nbytes;
  pthread_mutex_lock(&lock);
  struct region *other = regions;
  while (other && !((char *)start < other->start + other->nbytes && other->start < end)) other = other->next;
  if (!other) add(start, nbytes, REGISTERED);
  pthread_mutex_unlock(&lock);
  return other ? cudaErrorHostMemoryAlreadyRegistered : cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *start) {
  pthread_mutex_lock(&lock);
  int found = drop(start, REGISTERED);
  pthread_mutex_unlock(&lock);
  return found ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
  memset(out, 0, sizeof *out);
  pthread_mutex_lock(&lock);
  struct region *found = region_of(address);
  out->type = !found ? cudaMemoryTypeUnregistered : found->kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  pthread_mutex_unlock(&lock);
  if (found) out->devicePointer = (void *)address;
  if (found && out->type == cudaMemoryTypeHost) out->hostPointer = (void *)address;
  return cudaSuccess;
}

static cudaError_t copy(void *to, const void *from, size_t nbytes) {
  pthread_mutex_lock(&lock);
  struct region *there = region_of(to), *here = region_of(from);
  int within = there && here && there->kind == DEVICE && here->kind == DEVICE;
  counts.copies++;
  pthread_mutex_unlock(&lock);
  if (!(within && nbytes > LARGEST_COPY_BYTES)) memcpy(to, from, nbytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind) {
  if (captured_here) return cudaErrorStreamCaptureImplicit;
  return copy(to, from, nbytes);
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t on) {
  struct CUgraph_st *graph = capturing(on);
  if (graph) return graph->copies++, cudaSuccess;
  return copy(to, from, n);
}

EXPORT cudaError_t cudaMemset(void *start, int value, size_t nbytes) {
  if (nbytes <= LARGEST_FILL_BYTES) memset(start, value, nbytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *start, int value, size_t nbytes, cudaStream_t on) {
  struct CUgraph_st *graph = capturing(on);
  if (graph) return graph->copies++, cudaSuccess;
  return cudaMemset(start, value, nbytes);
}

// The device

EXPORT cudaError_t cudaGetDeviceCount(int *out) { return *out = standin_setting("STANDIN_DEVICES", 2), cudaSuccess; }
EXPORT int standin_current(void) { return current_device; }
EXPORT cudaError_t cudaGetDevice(int *out) { return *out = current_device, cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) { return current_device = device, cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int *out) { return *out = 13000, cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *out) { return *out = 13000, cudaSuccess; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *out, int from, int to) { return *out = 0, cudaSuccess; }

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
  *out = (struct cudaDeviceProp){
      .name = "STAND-IN H100",
      .totalGlobalMem = standin_setting("STANDIN_BYTES", 80L << 30),
      .major = 9,
      .minor = 0,
      .multiProcessorCount = 132,
      .warpSize = 32,
      .maxThreadsPerBlock = 1024,
      .maxThreadsPerMultiProcessor = 2048,
      .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {2147483647, 65535, 65535},
      .sharedMemPerBlock = 48 << 10,
      .sharedMemPerBlockOptin = 227 << 10,
      .sharedMemPerMultiprocessor = 228 << 10,
      .regsPerBlock = 65536,
      .regsPerMultiprocessor = 65536,
      .l2CacheSize = 50 << 20,
      .textureAlignment = 512,
      .unifiedAddressing = 1,
      .canMapHostMemory = 1,
  };
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr which, int device) {
  switch ((int)which) {
    case cudaDevAttrComputeCapabilityMajor: *out = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *out = 0; break;
    case cudaDevAttrMultiProcessorCount: *out = 132; break;
    case cudaDevAttrMaxThreadsPerBlock: *out = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = 227 << 10; break;
    case cudaDevAttrWarpSize: *out = 32; break;
    default: *out = 1;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device) {
  return snprintf(out, size, "0000:00:00.0"), cudaSuccess;
}

// Streams and events. Whatever is enqueued is done at once, but that a kernel may take time of its stream as a test says:
// an event holds when the stream that it was recorded on was done.

static double kernel_ms, legacy_until, latest;

EXPORT void standin_set_kernel_seconds(double seconds) { kernel_ms = seconds * 1e3; }

static double now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

static double later(double a, double b) { return a > b ? a : b; }

static double *until(cudaStream_t stream) { return (uintptr_t)stream > 2 ? &stream->until_ms : &legacy_until; }

static void busy(cudaStream_t stream, double ms) {
  *until(stream) = later(*until(stream), now_ms()) + ms;
  latest = later(latest, *until(stream));
}

// Which kernels were launched, by the address that stands for each on the host.
#define N_KERNELS (1 << 17)
static struct kernel {
  const void *function;
  const char *name;
  long launches;
} kernels[N_KERNELS];

static struct kernel *kernel_of(const void *function) {
  size_t place = ((uintptr_t)function >> 4) * 0x9e3779b97f4a7c15u >> 47;
  while (kernels[place].function && kernels[place].function != function) place = (place + 1) % N_KERNELS;
  return &kernels[place];
}
EXPORT void __cudaRegisterFunction(void **binary, const char *function, char *device_function, const char *name,
                                   int threads, void *tid, void *bid, void *block, void *grid, int *warp) {
  struct kernel *kernel = kernel_of(function);
  kernel->function = function, kernel->name = name;
}
EXPORT void standin_each_kernel(void (*with)(const char *name, long launches)) {
  for (struct kernel *kernel = kernels; kernel < kernels + N_KERNELS; kernel++)
    if (kernel->launches) with(kernel->name, kernel->launches);
}

static long by_device[8];
EXPORT long standin_launches_on(int device) { return by_device[device]; }
EXPORT int standin_check(const char *name, void *on) {
  cudaStream_t stream = on;
  __atomic_add_fetch(&by_device[current_device & 7], 1, __ATOMIC_RELAXED);
  long wanted = standin_setting("STANDIN_EXPECT_DEVICE", -1);
  if (wanted >= 0 && current_device != wanted && !getenv("STANDIN_QUIET"))
    fprintf(stderr, "STANDIN: kernel %s launched with device %d current\n", name ? name : "?", current_device);
  if ((uintptr_t)stream > 2 && stream->device != current_device) {
    fprintf(stderr, "STANDIN: kernel %s on a stream of device %d while device %d is current\n", name ? name : "?", stream->device, current_device);
    return 1;
  }
  return 0;
}
static cudaError_t launch(const void *function, cudaStream_t stream) {
  { struct kernel *k = kernel_of(function); if (standin_check(k->function ? k->name : NULL, stream)) return cudaErrorInvalidResourceHandle; }
  standin_count_launch_on(stream);
  if (capturing(stream)) return cudaSuccess;
  struct kernel *kernel = kernel_of(function);
  if (kernel->function) __atomic_add_fetch(&kernel->launches, 1, __ATOMIC_RELAXED);
  busy(stream, kernel_ms);
  return cudaSuccess;
}

static cudaError_t synchronize(double ms) {
  __atomic_add_fetch(&counts.synchronizations, 1, __ATOMIC_RELAXED);
  while (now_ms() < ms) usleep(10);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *out) { *out = calloc(1, 128); (*out)->device = current_device; return cudaSuccess; }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return cudaStreamCreate(out); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
  return cudaStreamCreate(out);
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *out) { return *out = 0, cudaSuccess; }

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
  return *out = capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *n) {
  struct CUgraph_st *found = capturing(stream);
  *status = found ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = found ? stream->capture_id : 0;
  if (graph) *graph = found;
  if (n) *n = 0;
  return cudaSuccess;
}

// Graphs. What a capturing stream is given is counted, not done; a replay is one launch. As on a device, the default
// stream cannot be captured, and nobody may wait for a stream that is.

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  static unsigned long long captures;
  if ((uintptr_t)stream <= 2 || stream->capturing) return cudaErrorStreamCaptureUnsupported;
  stream->capturing = calloc(1, sizeof *stream->capturing);
  stream->capture_id = __atomic_add_fetch(&captures, 1, __ATOMIC_RELAXED);
  return captured_here = stream, cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) {
  *out = capturing(stream);
  if (!*out) return cudaErrorIllegalState;
  stream->capturing = NULL;
  return captured_here = NULL, cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) {
  return *n = graph->kernels + graph->copies, cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
  struct CUgraph_st *made = malloc(sizeof *made);
  *made = *graph;
  return *out = (cudaGraphExec_t)made, cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return free(graph), cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return free(graph), cudaSuccess; }
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t made, cudaStream_t stream) {
  struct CUgraph_st *graph = (struct CUgraph_st *)made;
  __atomic_add_fetch(&counts.launches, 1, __ATOMIC_RELAXED);
  __atomic_add_fetch(&counts.graph_launches, 1, __ATOMIC_RELAXED);
  __atomic_add_fetch(&counts.graph_kernels, graph->kernels, __ATOMIC_RELAXED);
  busy(stream, kernel_ms * graph->kernels);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
  return captured_here ? cudaErrorStreamCaptureUnsupported : synchronize(latest);
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return capturing(stream) ? cudaErrorStreamCaptureUnsupported : synchronize(*until(stream));
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) { return synchronize(*(double *)event); }

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *out) { *out = calloc(1, 64); ((int *)*out)[4] = current_device; return cudaSuccess; }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) { return cudaEventCreate(out); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  int of = (uintptr_t)stream > 2 ? stream->device : current_device;
  if (((int *)event)[4] != of) { fprintf(stderr, "STANDIN: event of device %d recorded on a stream of device %d\n", ((int *)event)[4], of); return cudaErrorInvalidResourceHandle; }
  *(double *)event = later(now_ms(), *until(stream));
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  return now_ms() < *(double *)event ? cudaErrorNotReady : cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  *until(stream) = later(*until(stream), *(double *)event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float *out, cudaEvent_t from, cudaEvent_t to) {
  return *out = *(double *)to - *(double *)from, cudaSuccess;
}

// Kernels: torch's own are registered when its libraries are loaded, and do nothing when they are launched

EXPORT cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t on) {
  return launch(f, on);
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void **args, size_t shared,
                                      cudaStream_t on) {
  return launch(f, on);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **args) {
  return launch(f, config->stream);
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *f) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = 90;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *f, int block, size_t shared) {
  return *out = 2, cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *f, int block,
                                                                          size_t shared, unsigned flags) {
  return *out = 2, cudaSuccess;
}

EXPORT void **__cudaRegisterFatBinary(void *binary) {
  static char nothing[64];
  return (void **)nothing;
}
static __thread cudaStream_t pushed;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *on) {
  return pushed = on, 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *on) {
  return *(cudaStream_t *)on = pushed, cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *f) { return *out = (cudaKernel_t)f, cudaSuccess; }
EXPORT cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
  static char nothing[4096];
  return *out = nothing, cudaSuccess;
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the stand-in";
}
EXPORT const char *cudaGetErrorName(cudaError_t error) { return "standinError"; }

static int nothing(void) { return 0; }

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  void *found = driver ? dlsym(driver, name) : NULL;
  *out = found ? found : (void *)nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// cudaMallocAsync
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *out, int device) { return *out = (cudaMemPool_t)1, cudaSuccess; }
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) {
  *(uint64_t *)v = 0;
  if (a == cudaMemPoolAttrReservedMemCurrent || a == cudaMemPoolAttrUsedMemCurrent) *(uint64_t *)v = counts.used_bytes;
  if (a == cudaMemPoolAttrReservedMemHigh || a == cudaMemPoolAttrUsedMemHigh) *(uint64_t *)v = counts.peak_bytes;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMallocAsync(void **out, size_t n, cudaStream_t on) { return cudaMalloc(out, n); }
EXPORT cudaError_t cudaFreeAsync(void *p, cudaStream_t on) { return cudaFree(p); }
