# One warning list, and the three shapes of target that this project has.

set(BASIN_WARNINGS
    -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wcast-align -Wnull-dereference
    -Wduplicated-cond -Wlogical-op -Wformat=2)
set(BASIN_CXX_WARNINGS -Wold-style-cast -Wnon-virtual-dtor -Woverloaded-virtual)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  list(REMOVE_ITEM BASIN_WARNINGS -Wduplicated-cond -Wlogical-op)
endif()

# The CPU targets that this build has, by the names of BASIN_CPU.
set(BASIN_CPU_TARGETS generic)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND BASIN_CPU_TARGETS avx2 avx512_bf16 amx)
endif()

# libFuzzer is clang's; clang 14 has no std::source_location.
if(BASIN_FUZZ AND NOT (CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 15))
  message(FATAL_ERROR "BASIN_FUZZ=ON needs clang 15 or later, and the compiler is ${CMAKE_CXX_COMPILER_ID} "
                      "${CMAKE_CXX_COMPILER_VERSION}. Set CMAKE_CXX_COMPILER, or leave BASIN_FUZZ off.")
endif()

# fmt is compiled in: who links an installed library does not need it. Not so under the sanitizers, where its headers would take
# nine tenths of the time.
set(BASIN_FMT $<BUILD_INTERFACE:fmt::fmt-header-only>)
if(BASIN_SANITIZE OR BASIN_FUZZ)
  set(BASIN_FMT fmt::fmt)
endif()

function(basin_target_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)  # for those who link the installed library
  target_compile_options(${target} PRIVATE ${BASIN_WARNINGS} $<$<COMPILE_LANGUAGE:CXX>:${BASIN_CXX_WARNINGS}>)
  if(BASIN_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  # One rounding per operation unless the source says fma: contraction would let the compiler choose the order.
  target_compile_options(${target} PRIVATE -ffp-contract=off)
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                             PRIVATE ${PROJECT_SOURCE_DIR}/src)
  if(BASIN_SANITIZE)
    target_compile_options(${target} PUBLIC -fsanitize=address,undefined -fno-sanitize-recover=all
                                            -fno-omit-frame-pointer)
    target_compile_definitions(${target} PRIVATE _GLIBCXX_ASSERTIONS)
    target_link_options(${target} PUBLIC -fsanitize=address,undefined)
  endif()
  if(BASIN_FUZZ)
    target_compile_options(${target} PUBLIC -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
                                            -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=address,undefined)
  endif()
endfunction()

# basin_module(name SOURCES a.cc ... [DEPENDS other modules] [LINK libraries]) -> static library basin_<name>
function(basin_module name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPENDS;LINK" ${ARGN})
  add_library(basin_${name} STATIC ${arg_SOURCES})
  add_library(basin::${name} ALIAS basin_${name})
  set_target_properties(basin_${name} PROPERTIES EXPORT_NAME ${name})
  basin_target_options(basin_${name})
  list(TRANSFORM arg_DEPENDS PREPEND basin_)
  target_link_libraries(basin_${name} PUBLIC ${arg_DEPENDS} PRIVATE ${BASIN_FMT} ${arg_LINK})
endfunction()

# basin_test(name SOURCES a.cc ... DEPENDS modules [LINK libraries] [LABELS labels] [ENVIRONMENT A=B] [PER_TARGET]):
# one executable, one CTest entry per GoogleTest case. tests/ and src/ are on its include path. PER_TARGET: one entry
# per case and compiled CPU target, forced by BASIN_CPU.
function(basin_test name)
  cmake_parse_arguments(arg "PER_TARGET" "" "SOURCES;DEPENDS;LINK;LABELS;ENVIRONMENT" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  basin_target_options(${name})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  list(TRANSFORM arg_DEPENDS PREPEND basin_)
  target_link_libraries(${name} PRIVATE ${arg_DEPENDS} ${BASIN_FMT} GTest::gmock_main ${arg_LINK})
  target_compile_definitions(${name} PRIVATE BASIN_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  if(NOT arg_PER_TARGET)
    basin_discover_tests(${name} LABELS ${arg_LABELS} ENVIRONMENT ${arg_ENVIRONMENT})
    return()
  endif()
  foreach(target ${BASIN_CPU_TARGETS})
    basin_discover_tests(${name} TARGET ${target} LABELS per_target ${arg_LABELS}
                         ENVIRONMENT BASIN_CPU=${target} ${arg_ENVIRONMENT})
  endforeach()
endfunction()

# basin_discover_tests(name [TARGET cpu target] [LABELS labels] [ENVIRONMENT A=B]): CTest entries of an executable, with
# the label cpu unless they have gpu. Not by
# the PROPERTIES of gtest_discover_tests: they cannot hold a list, and a second label swallows what follows it.
function(basin_discover_tests name)
  cmake_parse_arguments(arg "" "TARGET" "LABELS;ENVIRONMENT" ${ARGN})
  set(prefix "")
  if(arg_TARGET)
    set(prefix TEST_PREFIX ${arg_TARGET}.)
  endif()
  set(machine cpu)
  if("gpu" IN_LIST arg_LABELS)
    set(machine "")  # `ctest -L cpu` must not run it
  endif()
  set(tests ${name}_${arg_TARGET}_tests)
  gtest_discover_tests(${name} ${prefix} DISCOVERY_MODE PRE_TEST TEST_LIST ${tests})
  set(properties ${CMAKE_CURRENT_BINARY_DIR}/${tests}_properties.cmake)
  file(WRITE ${properties} "if(${tests})
  set_tests_properties(\${${tests}} PROPERTIES LABELS \"${machine};${arg_LABELS}\" ENVIRONMENT \"${arg_ENVIRONMENT}\")
endif()
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${properties})
endfunction()

# basin_bench(name SOURCES a.cc ... DEPENDS modules): a Google Benchmark executable, not run by CTest.
function(basin_bench name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  basin_target_options(${name})
  list(TRANSFORM arg_DEPENDS PREPEND basin_)
  target_link_libraries(${name} PRIVATE ${arg_DEPENDS} ${BASIN_FMT} benchmark::benchmark)
endfunction()

# basin_cpu_kernels(module [AMX] source.cc ...): compiles each source once per CPU target and adds the objects to
# basin_<module>; for amx only if AMX says so, other modules run there what they have for avx512_bf16. The source sees
# BASIN_TARGET = generic | avx2 | avx512_bf16 | amx, and puts everything it defines into
# namespace basin::...::BASIN_TARGET; Highway's static dispatch follows the flags. Such a source must not emit
# inline or template functions of shared headers (the linker would keep one copy, built for any target), so it
# includes only plain declarations, intrinsics and Highway; tools/check_kernel_symbols.py holds it to that.
# Under the sanitizers kernels are held to what a wrong kernel does: every read and write of memory by the address sanitizer,
# and overflows, shifts, divisions and bounds. Not checked are the references of inlined lambdas to each other's locals
# (use after scope, null), which are most of a kernel, nor what the address sanitizer sees anyway, at the access itself
# (pointer-overflow, object-size): with them GCC takes minutes for a kernel and a target, without them 30 s. For the same reason
# alignment is checked on the generic target alone. Fuzzers, which feed what reads bytes, leave kernels as they are,
# and their AVX-512 is AVX2: clang 16 crashes on one of attention's otherwise.
function(basin_cpu_kernels module)
  cmake_parse_arguments(arg "AMX" "" "" ${ARGN})
  set(flags_generic "")
  set(flags_avx2 -march=haswell -mtune=generic)
  set(flags_avx512_bf16 -march=cooperlake -mtune=generic -mprefer-vector-width=512)
  set(flags_amx ${flags_avx512_bf16} -mamx-tile -mamx-int8)
  if(BASIN_FUZZ)
    set(flags_avx512_bf16 ${flags_avx2})
    set(flags_amx ${flags_avx2})
  endif()
  set(targets ${BASIN_CPU_TARGETS})
  if(NOT arg_AMX)
    list(REMOVE_ITEM targets amx)
  endif()
  foreach(target ${targets})
    set(objects basin_${module}_${target})
    add_library(${objects} OBJECT ${arg_UNPARSED_ARGUMENTS})
    basin_target_options(${objects})
    target_compile_definitions(${objects} PRIVATE BASIN_TARGET=${target} BASIN_TARGET_${target}=1
                               HWY_DISABLE_PCLMUL_AES=1)  # -march=haswell has no AES, which we never use
    target_compile_options(${objects} PRIVATE ${flags_${target}})
    if(BASIN_FUZZ)
      target_compile_options(${objects} PRIVATE -fno-sanitize=all)
    elseif(BASIN_SANITIZE)
      target_compile_options(${objects} PRIVATE -O2 -fno-sanitize-address-use-after-scope
                             -fno-sanitize=null,pointer-overflow,object-size)
      if(NOT target STREQUAL "generic")
        target_compile_options(${objects} PRIVATE -fno-sanitize=alignment)
      endif()
    endif()
    target_sources(basin_${module} PRIVATE $<TARGET_OBJECTS:${objects}>)
  endforeach()
endfunction()

# The interpreter for tests written in Python: the one of ./test's virtual environment when it is there.
if(EXISTS ${CMAKE_CURRENT_LIST_DIR}/../.venv/bin/python)
  set(BASIN_PYTHON ${CMAKE_CURRENT_LIST_DIR}/../.venv/bin/python CACHE FILEPATH "Python for tests")
else()
  set(BASIN_PYTHON python3 CACHE FILEPATH "Python for tests")
endif()

# basin_python_test(name script.py [LABELS labels]): a unittest script; it finds the program in BASIN_BINARY.
function(basin_python_test name script)
  cmake_parse_arguments(arg "" "" "LABELS" ${ARGN})
  add_test(NAME ${name} COMMAND ${BASIN_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/${script})
  set_tests_properties(${name} PROPERTIES
    LABELS "cpu;${arg_LABELS}"
    ENVIRONMENT "BASIN_BINARY=$<TARGET_FILE:basin>;BASIN_SOURCE_DIR=${PROJECT_SOURCE_DIR}")
endfunction()
