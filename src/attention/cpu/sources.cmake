# The fast CPU path: the scheduler once, the kernel once per CPU target.
target_sources(basin_attention PRIVATE ${CMAKE_CURRENT_LIST_DIR}/cpu.cc)
basin_cpu_kernels(attention ${CMAKE_CURRENT_LIST_DIR}/kernel.cc)
find_package(hwy 1.0 REQUIRED)
