// What the stand-in's parts share, and what the tests read through ctypes.
#pragma once

#define EXPORT __attribute__((visibility("default")))

struct standin_counts {
  long mallocs, frees, copies, launches, synchronizations;
  long used_bytes, peak_bytes;  // taken from the device, whatever torch's allocator says
  long graph_launches, graph_kernels;  // replays of CUDA graphs, each of them one launch, and the kernels in them
};

void standin_read(struct standin_counts *out);
void standin_reset_peak(void);
int standin_take(long nbytes);
void standin_count_launch(void);
void standin_count_launch_on(void *stream);
void standin_each_kernel(void (*with)(const char *name, long launches));  // of torch's own, since the process began
void standin_set_kernel_seconds(double seconds);  // of its stream that each kernel of torch takes; none at first
long standin_setting(const char *name, long otherwise);
