# The CUDA backend: refused by name wherever it cannot be built, so that BASIN_CUDA=ON never means "maybe". What means that
# is AUTO: on where there is an nvcc.
if(NOT BASIN_CUDA)
  return()
endif()
include(CheckLanguage)
check_language(CUDA)
if(BASIN_CUDA STREQUAL "AUTO")
  if(NOT CMAKE_CUDA_COMPILER)
    message(STATUS "No nvcc, so the CUDA backend is not compiled (BASIN_CUDA=AUTO)")
    set(BASIN_CUDA OFF)
    return()
  endif()
  set(BASIN_CUDA ON)
endif()
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "BASIN_CUDA=ON, but no nvcc was found. Install CUDA 13 and put nvcc on PATH, "
                      "or set CUDACXX; the preset `release` builds for the CPU alone.")
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real CACHE STRING "GPU architectures")
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES STREQUAL "90a-real")
  message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES is ${CMAKE_CUDA_ARCHITECTURES}; the kernels are for 90a-real alone: "
                      "they use instructions that only this architecture has.")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
  message(FATAL_ERROR "BASIN_CUDA=ON needs CUDA 13 or later; ${CMAKE_CUDA_COMPILER} is ${CMAKE_CUDA_COMPILER_VERSION}.")
endif()
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

# Everything that exists because of CUDA, for `cmake --build build/cuda --target basin_cuda`.
add_custom_target(basin_cuda)

# The one list of flags for device code. A spilled register or a byte of local memory is a bug: ptxas warns of it, and
# every warning of nvcc and ptxas is an error, for users too.
set(BASIN_CUDA_OPTIONS
    --expt-relaxed-constexpr -lineinfo
    -Xptxas=-warn-spills,-warn-lmem-usage,-Werror -Werror=all-warnings
    -Xcompiler=-Wall,-Wextra)

# basin_cuda_kernels(module source.cu ...): device code of basin_<module>.
function(basin_cuda_kernels module)
  set(objects basin_${module}_kernels)
  add_library(${objects} OBJECT ${ARGN})
  target_compile_options(${objects} PRIVATE ${BASIN_CUDA_OPTIONS})
  set_property(TARGET ${objects} PROPERTY RULE_LAUNCH_COMPILE ${PROJECT_SOURCE_DIR}/cmake/compile_kernel.sh)
  target_include_directories(${objects} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_sources(basin_${module} PRIVATE $<TARGET_OBJECTS:${objects}>)
endfunction()
