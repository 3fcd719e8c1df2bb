# cmake --install: the public layers (base, tensor, attention) as a library for C++ and C, found by find_package(basin),
# and the program.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/basin)
# (cuda.h stays behind: its library is not exported yet, and a header alone would be a link error at the user's.)
install(DIRECTORY include/basin DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library PATTERN cuda.h EXCLUDE)
install(TARGETS basin_base basin_tensor basin_attention basin_attention_c EXPORT basin COMPONENT library
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
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
