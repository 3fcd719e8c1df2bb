// What CUDA is asked once per device or kernel, so that launches need not ask again. Safe from any thread.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/cuda/sm90/instances.h"

namespace basin::attention::cuda {

/// Throws Error(internal) with CUDA's own words unless `status` is success.
void expect_success(cudaError_t status, const char* what);

struct Device {
  int ordinal = 0;
  int multiprocessors = 0;
};

/// The current device. Throws Error(unsupported) when it is not of compute capability 9.0.
Device current_device();

/// Lets a kernel use the shared memory it was compiled for on `device`, which is current.
void prepare(const sm90::Instance& instance, const Device& device);

}  // namespace basin::attention::cuda
