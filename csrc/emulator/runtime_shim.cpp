// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0
//
// Stands in for CuTe DSL's `libcute_dsl_runtime.so`, which CUTE_DSL_LIBS selects: the functions
// that a compiled host function calls to launch a kernel. There is no driver and no GPU; a launch
// goes to a handler. Signatures and values are those of CUDA 12 and 13.
//
// Only what host code needs is here. Anything else that the real library has is named by
// `te_grouped_mlp/emulator/runtime.py` before a kernel runs.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

using Error = int;
constexpr Error kSuccess = 0;
constexpr Error kInvalidValue = 1;
constexpr Error kNotSupported = 801;

struct Dim3 {
  unsigned x, y, z;
};

// cudaLaunchAttribute: an identity, padding to eight bytes, and a union of 64 bytes.
struct LaunchAttribute {
  int id;
  int padding;
  union {
    char bytes[64];
    Dim3 cluster;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

// cudaLaunchConfig_t.
struct LaunchConfig {
  Dim3 grid, block;
  std::size_t dynamic_shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56);

constexpr int kClusterDimension = 4;  // cudaLaunchAttributeClusterDimension

// What the handler gets; `te_grouped_mlp/emulator/runtime.py` has the same fields.
struct Launch {
  const char* entry;
  const void* image;  // the cubin that holds the entry, as the host code carries it
  unsigned grid[3], block[3], cluster[3];
  std::uint64_t dynamic_shared_bytes;
  void** parameters;  // one address for each parameter of the entry
};
using Handler = Error (*)(const Launch*);
Handler handler = nullptr;

struct Library {
  const void* image;
};
struct Kernel {
  std::string entry;
  const void* image;
};

// Host code keeps handles for as long as the process runs, so nothing is freed before its end.
std::mutex owner;
std::vector<std::unique_ptr<Library>> libraries;
std::vector<std::unique_ptr<Kernel>> kernels;

// cudaDeviceAttr numbers, and a B200's values.
Error device_attribute(int* value, int attribute) {
  switch (attribute) {
    case 1: *value = 1024; return kSuccess;     // threads of a block
    case 8: *value = 49152; return kSuccess;    // shared memory of a block without opting in
    case 10: *value = 32; return kSuccess;      // lanes of a warp
    case 16: *value = 148; return kSuccess;     // multiprocessors
    case 39: *value = 2048; return kSuccess;    // threads of a multiprocessor
    case 75: *value = 10; return kSuccess;      // compute capability, major
    case 76: *value = 0; return kSuccess;       // and minor
    case 81: *value = 233472; return kSuccess;  // shared memory of a multiprocessor
    case 97: *value = 232448; return kSuccess;  // shared memory of a block that opts in
    default: return kInvalidValue;
  }
}

Error launch(const Kernel* kernel, const LaunchConfig& config, void** parameters) {
  if (handler == nullptr || kernel == nullptr) return kNotSupported;
  Launch given{kernel->entry.c_str(),
               kernel->image,
               {config.grid.x, config.grid.y, config.grid.z},
               {config.block.x, config.block.y, config.block.z},
               {1, 1, 1},
               config.dynamic_shared_bytes,
               parameters};
  for (unsigned i = 0; i < config.num_attributes; ++i) {
    const LaunchAttribute& attribute = config.attributes[i];
    if (attribute.id != kClusterDimension) continue;
    given.cluster[0] = attribute.value.cluster.x;
    given.cluster[1] = attribute.value.cluster.y;
    given.cluster[2] = attribute.value.cluster.z;
  }
  return handler(&given);
}

}  // namespace

#define EMULATOR_API extern "C" __attribute__((visibility("default")))

EMULATOR_API void te_grouped_mlp_set_launch_handler(Handler given) { handler = given; }

EMULATOR_API Error _cudaLibraryLoadData(void** library, const void* image, void*, void*, unsigned,
                                        void*, void*, unsigned) {
  const std::lock_guard<std::mutex> guard(owner);
  libraries.push_back(std::make_unique<Library>(Library{image}));
  *library = libraries.back().get();
  return kSuccess;
}

EMULATOR_API Error _cudaLibraryUnload(void*) { return kSuccess; }

EMULATOR_API Error _cudaLibraryGetKernel(void** kernel, void* library, const char* entry) {
  const std::lock_guard<std::mutex> guard(owner);
  const void* image = static_cast<Library*>(library)->image;
  kernels.push_back(std::make_unique<Kernel>(Kernel{entry, image}));
  *kernel = kernels.back().get();
  return kSuccess;
}

EMULATOR_API Error _cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;
  return kSuccess;
}
EMULATOR_API Error _cudaFuncSetAttribute(const void*, int, int) { return kSuccess; }
EMULATOR_API Error _cudaKernelSetAttributeForDevice(void*, int, int, int) { return kSuccess; }
EMULATOR_API Error _cudaDeviceGetAttribute(int* value, int attribute, int) {
  return device_attribute(value, attribute);
}
EMULATOR_API Error _cudaGetDevice(int* device) {
  *device = 0;
  return kSuccess;
}
EMULATOR_API Error _cudaSetDevice(int device) { return device == 0 ? kSuccess : kInvalidValue; }
EMULATOR_API Error _cudaGetDeviceCount(int* count) {
  *count = 1;
  return kSuccess;
}
EMULATOR_API Error _cuDeviceGet(int* device, int ordinal) {
  *device = 0;
  return ordinal == 0 ? kSuccess : kInvalidValue;
}
EMULATOR_API Error _cudaDeviceSynchronize() { return kSuccess; }
EMULATOR_API Error _cudaStreamSynchronize(void*) { return kSuccess; }

EMULATOR_API Error _cudaLaunchKernelEx(const LaunchConfig* config, const void* kernel,
                                       void** parameters) {
  return launch(static_cast<const Kernel*>(kernel), *config, parameters);
}

EMULATOR_API Error _cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** parameters,
                                     std::size_t dynamic_shared_bytes, void* stream) {
  const LaunchConfig config{grid, block, dynamic_shared_bytes, stream, nullptr, 0};
  return launch(static_cast<const Kernel*>(kernel), config, parameters);
}

// MLIR's CUDA dialect: one load of the image for a process, then one call for each device.
EMULATOR_API int cuda_dialect_init_library_once(void** slot, Error (*load)(void**),
                                                Error (*per_device)(void**, int),
                                                void (*raise)(const char*, const char*)) {
  if (*slot != nullptr) return 0;
  void* library = nullptr;
  Error error = load(&library);
  if (error == kSuccess && per_device != nullptr) error = per_device(&library, 0);
  if (error != kSuccess) {
    raise("RuntimeError", "the emulator's CUDA runtime could not load a kernel");
    return -1;
  }
  *slot = library;
  return 0;
}
EMULATOR_API void cuda_dialect_unload_library_once(void** slot) { *slot = nullptr; }

EMULATOR_API const char* cuda_dialect_get_error_name(Error error) {
  switch (error) {
    case kSuccess: return "cudaSuccess";
    case kInvalidValue: return "cudaErrorInvalidValue";
    case kNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}
EMULATOR_API void cuda_dialect_print_on_error(Error error) {
  if (error != kSuccess) {
    std::fprintf(stderr, "CUDA error in the emulator: %s\n", cuda_dialect_get_error_name(error));
  }
}
EMULATOR_API void cuda_dialect_assert_success(Error error) {
  cuda_dialect_print_on_error(error);
  if (error != kSuccess) std::abort();
}

// The real ones make an exception of the error; the host half raises its own after the call.
EMULATOR_API void CuteDSLRT_TVMFFISetRaisedCudaError(Error error) {
  cuda_dialect_print_on_error(error);
}
EMULATOR_API void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(Error error) {
  cuda_dialect_print_on_error(error);
}
