# The fast CPU path: the schedulers once, the kernels once per CPU target.
target_sources(basin_attention PRIVATE ${CMAKE_CURRENT_LIST_DIR}/cpu.cc ${CMAKE_CURRENT_LIST_DIR}/backward.cc)
basin_cpu_kernels(attention ${CMAKE_CURRENT_LIST_DIR}/kernel.cc ${CMAKE_CURRENT_LIST_DIR}/backward_kernel.cc)
find_package(hwy 1.0 REQUIRED)
