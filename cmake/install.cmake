# cmake --install: the public layers (base, tensor, attention) as a library for C++ and C, found by find_package(basin) and
# by pkg-config, and the program. Component `library` is the one, `program` the other.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/basin)
set(libraries basin_base basin_tensor basin_attention basin_attention_c)
set(left_out PATTERN "cuda*.h" EXCLUDE)  # a header without its library would be a link error at the user's
if(BASIN_CUDA)
  list(APPEND libraries basin_attention_cuda basin_attention_cuda_c)
  set(left_out "")
endif()
install(DIRECTORY include/basin DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library ${left_out})
install(TARGETS ${libraries} EXPORT basin COMPONENT library INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT basin NAMESPACE basin:: FILE basinTargets.cmake DESTINATION ${package_dir} COMPONENT library)
configure_package_config_file(cmake/basinConfig.cmake.in basinConfig.cmake INSTALL_DESTINATION ${package_dir})
# Below 1.0 a minor version may break.
write_basic_package_version_file(basinConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/basinConfig.cmake ${PROJECT_BINARY_DIR}/basinConfigVersion.cmake
        DESTINATION ${package_dir} COMPONENT library)

# basin_pkg_config(name description libs): NAME.pc, which finds what it speaks of beside itself, wherever that was moved.
function(basin_pkg_config name description libs)
  set(directory ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
  cmake_path(IS_ABSOLUTE CMAKE_INSTALL_LIBDIR absolute)
  if(absolute)
    set(prefix ${CMAKE_INSTALL_PREFIX})
  else()
    file(RELATIVE_PATH up ${CMAKE_INSTALL_PREFIX}/${directory} ${CMAKE_INSTALL_PREFIX})
    string(REGEX REPLACE "/$" "" up "${up}")
    set(prefix "\${pcfiledir}/${up}")
  endif()
  foreach(kind LIB INCLUDE)
    cmake_path(IS_ABSOLUTE CMAKE_INSTALL_${kind}DIR absolute)
    set(${kind} ${CMAKE_INSTALL_${kind}DIR})
    if(NOT absolute)
      string(PREPEND ${kind} "\${prefix}/")
    endif()
  endforeach()
  configure_file(cmake/library.pc.in ${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${directory} COMPONENT library)
endfunction()

basin_pkg_config(basin-attention "Attention with sinks and windows, for C++20" "-lbasin_attention -lbasin_base -pthread")
basin_pkg_config(basin-attention-c "Attention with sinks and windows, for C" -lbasin_attention_c)
if(BASIN_CUDA)
  basin_pkg_config(basin-attention-cuda-c "Attention with sinks and windows on NVIDIA Hopper, for C" -lbasin_attention_cuda_c)
endif()
install(FILES LICENSE THIRD_PARTY_NOTICES.md DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/basin-attention-dev
        COMPONENT library)
if(BASIN_BUILD_PROGRAM)
  install(TARGETS basin COMPONENT program)
  install(FILES LICENSE THIRD_PARTY_NOTICES.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT program)
endif()
