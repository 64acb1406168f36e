// cuBLAS and cuDNN, as far as an answer of 0 is not enough. STANDIN_CUDNN_WORKSPACE_BYTES is what each convolution asks
// for; cuBLAS's own workspaces are allocated by torch, on the first product of each thread and stream.
#include "standin.h"

#include <cudnn.h>
#include <stdlib.h>
#include <string.h>

EXPORT int cublasCreate_v2(void **out) { return *out = calloc(1, 64), 0; }
EXPORT int cublasLtCreate(void **out) { return *out = calloc(1, 64), 0; }
EXPORT int cublasGetMathMode(void *handle, int *out) { return *out = 0; }
EXPORT int cublasGetPointerMode_v2(void *handle, int *out) { return *out = 0; }

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d,
                                          void *preference, int asked, char *results, int *found) {
  memset(results, 0, 112);  // one cublasLtMatmulHeuristicResult_t: an algorithm without workspace
  return *found = 1, 0;
}

EXPORT cudnnStatus_t cudnnCreate(cudnnHandle_t *out) { return *out = calloc(1, 64), CUDNN_STATUS_SUCCESS; }
EXPORT cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int *out) {
  return *out = which == MAJOR_VERSION ? 9 : which == MINOR_VERSION ? 20 : 0, CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *out) {
  int *made = calloc(1, 64);
  *made = type;
  return *out = made, CUDNN_STATUS_SUCCESS;
}

// cudnn-frontend asks how many engines there are (one), and each plan for its workspace.
EXPORT cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t asked, int64_t *found,
                                              void *out) {
  int64_t value = 0, count = 1;
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
    case CUDNN_ATTR_ENGINECFG_ENGINE: out = NULL; break;  // descriptors that the caller has made
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX: break;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE: value = standin_setting("STANDIN_CUDNN_WORKSPACE_BYTES", 0); break;
    default: count = 0;
  }
  if (out && asked && type == CUDNN_TYPE_INT64) memcpy(out, &value, sizeof value);
  if (found) *found = count;
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                         cudnnBackendDescriptor_t tensors) {
  return standin_count_launch(), CUDNN_STATUS_SUCCESS;
}

// Batch norm without workspace, with a reserve of STANDIN_CUDNN_RESERVE_BYTES; its launches are in batch_norm.c.
typedef cudnnTensorDescriptor_t tensor_t;
EXPORT cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const tensor_t x, const tensor_t z,
    const tensor_t y, const tensor_t scale, const cudnnActivationDescriptor_t activation, size_t *out) {
  return *out = 0, CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops,
    const cudnnActivationDescriptor_t activation, const tensor_t x, size_t *out) {
  return *out = standin_setting("STANDIN_CUDNN_RESERVE_BYTES", 0), CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const tensor_t x, const tensor_t y,
    const tensor_t dy, const tensor_t dz, const tensor_t dx, const tensor_t scale,
    const cudnnActivationDescriptor_t activation, size_t *out) {
  return *out = 0, CUDNN_STATUS_SUCCESS;
}
