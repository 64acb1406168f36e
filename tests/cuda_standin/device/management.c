// libnvidia-ml.so.1: what the allocator asks when it is out of memory, and what torch.cuda counts devices by.
#include <stdlib.h>
#define EXPORT __attribute__((visibility("default")))

EXPORT int nvmlInit_v2(void) { return 0; }
EXPORT int nvmlShutdown(void) { return 0; }
EXPORT int nvmlDeviceGetCount_v2(unsigned *out) { return *out = (getenv("STANDIN_DEVICES") ? atoi(getenv("STANDIN_DEVICES")) : 2), 0; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *out) { return *out = 13000, 0; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out) { return *out = (void *)1, 0; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { return *out = (void *)1, 0; }
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *out) { return *count = 0; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 0; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 0; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void) { return 0; }
