# cpack --config build/release/CPackConfig.cmake: two Debian packages, `basin` (the program) and `basin-attention-dev` (the
# library, for C++ and C). What they depend on is read from what was linked; CPU targets are chosen when they run.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME basin)
set(CPACK_PACKAGE_VENDOR "The Basin maintainers")
set(CPACK_PACKAGE_CONTACT "The Basin maintainers <maintainers@basin.invalid>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL program library)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(CPACK_COMPONENT_PROGRAM_DESCRIPTION "Runs, serves and examines language models whose attention leans on sinks:
learned sink logits, first tokens that stay visible, and windows.")
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME basin)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SUGGESTS librsvg2-bin)  # basin probe draws PNG with it
set(CPACK_COMPONENT_LIBRARY_DESCRIPTION "Attention with learned sink logits, sink tokens and windows, forward and
backward, as a static library for C++20 and a shared one for C.")
set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME basin-attention-dev)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libdevel)

# The notices that THIRD_PARTY_NOTICES.md asks of a binary distribution, from the packages that the build took things from.
# Boost's licence asks for none with object code.
set(copyright ${PROJECT_BINARY_DIR}/copyright)
file(READ LICENSE text)
file(WRITE ${copyright} "Basin ${PROJECT_VERSION}\n\n${text}")
set(packages libfmt-dev libhwy-dev libcli11-dev nlohmann-json3-dev libpcre2-dev libutf8proc-dev)
foreach(package ${packages})
  set(notice /usr/share/doc/${package}/copyright)
  if(EXISTS ${notice})
    file(READ ${notice} text)
    file(APPEND ${copyright} "\n---- From Debian's ${package}:\n\n${text}")
  else()
    list(APPEND missing ${package})
  endif()
endforeach()
if(missing)  # not Debian: then there is no Debian package to be made, either
  list(JOIN missing ", " missing)
  message(STATUS "No Debian package: the notices of ${missing} are not under /usr/share/doc")
  return()
endif()
install(FILES ${copyright} DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/basin COMPONENT program EXCLUDE_FROM_ALL)
install(FILES ${copyright} DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/basin-attention-dev COMPONENT library EXCLUDE_FROM_ALL)
include(CPack)
