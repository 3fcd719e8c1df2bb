# The CUDA backend: refused by name wherever it cannot be built, so that BASIN_CUDA=ON never means "maybe".
if(BASIN_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "BASIN_CUDA=ON, but no nvcc was found. Install CUDA 13 and put nvcc on PATH, "
                        "or set CUDACXX; the preset `release` builds for the CPU alone.")
  endif()
  message(FATAL_ERROR "BASIN_CUDA=ON: the CUDA backend is not in this tree yet (nvcc found: "
                      "${CMAKE_CUDA_COMPILER}). The preset `release` builds for the CPU.")
endif()
