# cmake --install: the public layers (base, tensor, attention) as a library for C++ and C, found by find_package(basin),
# and the program.
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
install(FILES LICENSE THIRD_PARTY_NOTICES.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)
if(BASIN_BUILD_PROGRAM)
  install(TARGETS basin COMPONENT program)
endif()
