// libcuda.so.1: what Triton and the allocator's expandable segments ask of the driver. Kernels are loaded and launched,
// and do nothing. Memory counts with the runtime's, see standin.h.
#define _GNU_SOURCE
#include "standin.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GRANULARITY ((size_t)2 << 20)
#define OUT_OF_MEMORY 2

EXPORT int cuInit(unsigned flags) { return 0; }
EXPORT int cuDriverGetVersion(int *out) { return *out = 13000, 0; }
EXPORT int cuDeviceGet(int *out, int ordinal) { return *out = ordinal, 0; }
EXPORT int cuDeviceGetCount(int *out) { return *out = standin_setting("STANDIN_DEVICES", 2), 0; }
int standin_current(void); int standin_check(const char *name, void *on); int cudaSetDevice(int);
EXPORT int cuCtxGetCurrent(void **out) { return *out = (void *)(0x1234L + standin_current()), 0; }
EXPORT int cuCtxSetCurrent(void *context) { return cudaSetDevice((long)context - 0x1234L), 0; }
EXPORT int cuDevicePrimaryCtxRetain(void **out, int device) { return *out = (void *)(0x1234L + device), 0; }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
EXPORT int cuGetErrorString(int error, const char **out) { return *out = "an error of the stand-in", 0; }

// By the numbers of CUdevice_attribute in cuda.h.
EXPORT int cuDeviceGetAttribute(int *out, int which, int device) {
  switch (which) {
    case 1: *out = 1024; break;           // threads of a block
    case 8: *out = 48 << 10; break;       // shared memory of a block
    case 10: *out = 32; break;            // warp
    case 12: case 82: *out = 65536; break;  // registers
    case 13: *out = 1980000; break;       // clock, kHz
    case 16: *out = 132; break;           // multiprocessors
    case 36: *out = 2619000; break;       // memory clock, kHz
    case 37: *out = 5120; break;          // bus, bits
    case 75: *out = 9; break;             // compute capability
    case 76: *out = 0; break;
    case 97: *out = 227 << 10; break;     // shared memory of a block that asks for it
    case 103: case 128: *out = 0; break;  // no handles for other processes
    default: *out = 1;
  }
  return 0;
}

EXPORT int cuModuleLoad(void **out, const char *path) { return *out = calloc(1, 64), 0; }
EXPORT int cuModuleLoadData(void **out, const void *image) { return *out = calloc(1, 64), 0; }
EXPORT int cuModuleLoadDataEx(void **out, const void *image, unsigned n, void *options, void *values) {
  return *out = calloc(1, 64), 0;
}
EXPORT int cuModuleUnload(void *module) { return 0; }
EXPORT int cuModuleGetFunction(void **out, void *module, const char *name) { { char **made = calloc(1, 64); made[0] = strdup(name); return *out = made, 0; } }
EXPORT int cuFuncGetAttribute(int *out, int which, void *function) { return *out = which == 0 ? 1024 : 32, 0; }
EXPORT int cuFuncSetAttribute(void *function, int which, int value) { return 0; }
EXPORT int cuFuncSetCacheConfig(void *function, int config) { return 0; }
EXPORT int cuOccupancyMaxActiveClusters(int *out, void *function, void *config) { return *out = 1, 0; }
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, void *function, int block, size_t shared) {
  return *out = 2, 0;
}
EXPORT int cuLaunchKernelEx(const struct { unsigned sizes[7]; void *on; } *config, void *function, void **args,
                            void **extra) {
  if (standin_check(*(char **)function, config->on)) return 400;
  return standin_count_launch_on(config->on), 0;
}
EXPORT int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *on, void **args, void **extra) {
  if (standin_check(*(char **)function, on)) return 400;
  return standin_count_launch_on(on), 0;
}
EXPORT int cuLaunchCooperativeKernel(void) { return standin_count_launch(), 0; }
EXPORT int cuPointerGetAttribute(void *out, int which, uint64_t address) { return *(uint64_t *)out = address, 0; }
EXPORT int cuPointerGetAttributes(unsigned n, int *which, void **out, uint64_t address) { return 0; }
EXPORT int cuTensorMapEncodeTiled(void) { return 0; }
EXPORT int cuTensorMapEncodeIm2col(void) { return 0; }
EXPORT int cuCtxSetLimit(void) { return 0; }
EXPORT int cuCtxGetLimit(void) { return 0; }
EXPORT int cuLinkCreate_v2(void) { return 0; }
EXPORT int cuLinkAddData_v2(void) { return 0; }
EXPORT int cuLinkComplete(void) { return 0; }
EXPORT int cuMemsetD32Async(uint64_t start, unsigned value, size_t n, void *on) { return 0; }

// Virtual memory: the addresses are there from the start, and what is created counts.

EXPORT int cuMemGetAllocationGranularity(size_t *out, void *properties, int which) { return *out = GRANULARITY, 0; }

EXPORT int cuMemAddressReserve(uint64_t *out, size_t nbytes, size_t alignment, uint64_t wanted,
                               unsigned long long flags) {
  int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *start = mmap(NULL, nbytes + GRANULARITY, PROT_READ | PROT_WRITE, how, -1, 0);
  if (start == MAP_FAILED) return OUT_OF_MEMORY;
  *out = ((uint64_t)start + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  return 0;
}
EXPORT int cuMemAddressFree(uint64_t start, size_t nbytes) { return 0; }

EXPORT int cuMemCreate(unsigned long long *out, size_t nbytes, void *properties, unsigned long long flags) {
  if (standin_setting("STANDIN_NO_VMM", 0)) return 801;
  if (!standin_take(nbytes)) return OUT_OF_MEMORY;
  size_t *made = malloc(sizeof *made);
  *made = nbytes;
  *out = (unsigned long long)made;
  return 0;
}
EXPORT int cuMemRelease(unsigned long long handle) {
  size_t *made = (size_t *)handle;
  standin_take(-(long)*made);
  free(made);
  return 0;
}
EXPORT int cuMemMap(uint64_t start, size_t nbytes, size_t offset, unsigned long long handle, unsigned long long flags) {
  return 0;
}
EXPORT int cuMemUnmap(uint64_t start, size_t nbytes) { return 0; }
EXPORT int cuMemSetAccess(uint64_t start, size_t nbytes, void *description, size_t n) { return 0; }
EXPORT int cuMemExportToShareableHandle(void *out, unsigned long long handle, int type, unsigned long long flags) {
  return 0;
}
