// C interface of the library: launches kernels by name with one parameter struct.
//
// kvkernels/cuda decides the launch configuration (variant, grid, shared memory) for this library, for NVRTC modules
// and for the emulator.
#include <cuda_runtime.h>

#include <cstring>

#include "registry.h"

namespace kvk {
static const Registered*& head() {
  static const Registered* list = nullptr;
  return list;
}
Registered::Registered(const char* name, const void* function, size_t params_bytes)
    : name(name), function(function), params_bytes(params_bytes), next(head()) {
  head() = this;
}
const Registered* first() { return head(); }
const Registered* find(const char* name) {
  for (const Registered* r = head(); r; r = r->next)
    if (!strcmp(r->name, name)) return r;
  return nullptr;
}
}  // namespace kvk

#define KVK_TEXT_OF(x) #x
#define KVK_TEXT(x) KVK_TEXT_OF(x)

extern "C" {

// Fingerprint of the sources from which the library was built (cuda_sources.py).
const char* kvk_fingerprint() { return KVK_TEXT(KVK_FINGERPRINT); }

// Architectures of the library's machine code, such as 80_90. It also has PTX of the last one.
const char* kvk_architectures() { return KVK_TEXT(KVK_ARCHITECTURES); }

// Number of usable devices, or the negative CUDA error (-35: no driver).
int kvk_devices() {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  return error == cudaSuccess ? count : -(int)error;
}

// Size of a kernel's parameter struct in bytes; 0 for an unknown kernel.
size_t kvk_params_bytes(const char* name) {
  const kvk::Registered* kernel = kvk::find(name);
  return kernel ? kernel->params_bytes : 0;
}

// Enqueues a kernel on a stream. Returns 0 or the CUDA error; -1 for an unknown kernel.
int kvk_launch(const char* name, const unsigned* grid, unsigned threads, unsigned shared_bytes, void* params, void* stream) {
  const kvk::Registered* kernel = kvk::find(name);
  if (!kernel) return -1;
  if (shared_bytes > 48 * 1024) {
    cudaError_t error = cudaFuncSetAttribute(kernel->function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    if (error != cudaSuccess) return (int)error;
  }
  void* arguments[] = {params};
  return (int)cudaLaunchKernel(kernel->function, dim3(grid[0], grid[1], grid[2]), dim3(threads), arguments, shared_bytes,
                               (cudaStream_t)stream);
}

const char* kvk_error_string(int error) {
  return error == -1 ? "the library has no such kernel" : cudaGetErrorString((cudaError_t)error);
}

}  // extern "C"
