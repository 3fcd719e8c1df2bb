# The fast CPU path: the schedulers once, the kernels once per CPU target.
target_sources(basin_attention PRIVATE ${CMAKE_CURRENT_LIST_DIR}/cpu.cc ${CMAKE_CURRENT_LIST_DIR}/backward.cc
               ${CMAKE_CURRENT_LIST_DIR}/indexer.cc ${CMAKE_CURRENT_LIST_DIR}/select_topk.cc ${CMAKE_CURRENT_LIST_DIR}/sparse.cc)
basin_cpu_kernels(attention ${CMAKE_CURRENT_LIST_DIR}/kernel.cc ${CMAKE_CURRENT_LIST_DIR}/backward_kernel.cc
                  ${CMAKE_CURRENT_LIST_DIR}/sparse_kernel.cc)
find_package(hwy 1.0 REQUIRED)
