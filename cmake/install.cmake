# What `cmake --install` puts where, and the .deb that CPack makes of it (make package).
# tests/unit/install.py holds the list of files.
include(GNUInstallDirs)
if(NOT TANDEM_DAEMONS)
  install(TARGETS tandem)
  return()
endif()

# The one place that says who answers for a package: Maintainer of the .deb, Upstream-Contact of its
# copyright file. The domain is reserved for examples (RFC 2606) and takes no mail: who hands
# packages to others names an address that is read, with cmake -DTANDEM_PACKAGE_CONTACT="name
# <address>".
set(TANDEM_PACKAGE_CONTACT "tandem maintainers <maintainers@tandem.example>" CACHE STRING
    "Maintainer of the packages: name <address>")

set(programs tandem tandem-router tandem-prefill tandem-decode)
install(TARGETS ${programs} COMPONENT tandem)
if(TARGET tandem_cuda) # ../lib from the programs is where they look first
  install(TARGETS tandem_cuda LIBRARY DESTINATION lib COMPONENT cuda)
endif()

# Man pages and completion come from the programs' own --help.
set(man ${CMAKE_BINARY_DIR}/man)
add_custom_command(OUTPUT ${man}/stamp
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${man}
  COMMAND /usr/bin/python3 ${CMAKE_SOURCE_DIR}/scripts/gen-man --bin $<TARGET_FILE_DIR:tandem> --out
      ${man}
  COMMAND ${CMAKE_COMMAND} -E touch ${man}/stamp
  DEPENDS ${programs} ${CMAKE_SOURCE_DIR}/scripts/gen-man VERBATIM)
if(TANDEM_SANITIZE OR TANDEM_FUZZ OR CMAKE_BUILD_TYPE STREQUAL "None" OR CMAKE_CROSSCOMPILING)
  # such builds are not installed; "None" is that of the preset clang, which links nothing, and what
  # a cross compiler makes does not run here
  add_custom_target(td_man DEPENDS ${man}/stamp)
else()
  add_custom_target(td_man ALL DEPENDS ${man}/stamp)
endif()
install(DIRECTORY ${man}/man1 ${man}/man8 DESTINATION ${CMAKE_INSTALL_MANDIR} COMPONENT tandem)
foreach(name ${programs}) # shells load the file that has the command's name
  install(FILES ${man}/completion/tandem.bash DESTINATION
      ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME ${name} COMPONENT tandem)
  install(FILES ${man}/completion/${name}.fish DESTINATION
      ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT tandem)
endforeach()
install(FILES ${man}/completion/_tandem DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions
    COMPONENT tandem)

# Units and settings name paths below the prefix, which --prefix and CPack choose when they install.
# As everywhere, the settings of /usr are in /etc.
install(CODE "set(source \"${CMAKE_SOURCE_DIR}/deploy/systemd\")" COMPONENT tandem)
install(SCRIPT cmake/install_units.cmake COMPONENT tandem)

install(DIRECTORY proto/tandem proto/grpc DESTINATION ${CMAKE_INSTALL_DATADIR}/tandem/proto
    COMPONENT tandem FILES_MATCHING PATTERN "*.proto")
install(FILES LICENSE README.md SECURITY.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT tandem)
configure_file(cmake/copyright.in ${CMAKE_BINARY_DIR}/copyright @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/copyright DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT tandem)
if(TARGET tandem_cuda) # a package of its own
  install(FILES LICENSE ${CMAKE_BINARY_DIR}/copyright DESTINATION ${CMAKE_INSTALL_DOCDIR}-cuda
      COMPONENT cuda)
endif()
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT tandem)
set(pocket config.json generation_config.json model.safetensors special_tokens_map.json
    tokenizer.json tokenizer_config.json README.md PROVENANCE)
list(TRANSFORM pocket PREPEND models/pocket/)
install(FILES ${pocket} DESTINATION ${CMAKE_INSTALL_DATADIR}/tandem/models/pocket COMPONENT tandem)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME tandem)
set(CPACK_PACKAGE_CONTACT "${TANDEM_PACKAGE_CONTACT}")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "LLM serving with prefill and decode on separate machines")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR}/package)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL tandem)
if(TARGET tandem_cuda)
  list(APPEND CPACK_COMPONENTS_ALL cuda)
endif()
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_TANDEM_PACKAGE_NAME tandem)
set(CPACK_DEBIAN_TANDEM_PACKAGE_SECTION net)
# loaded at run time: --transfer rdma
set(CPACK_DEBIAN_TANDEM_PACKAGE_RECOMMENDS "libibverbs1, ibverbs-providers")
# loaded at run time: tandem bench serve --backend openai
set(CPACK_DEBIAN_TANDEM_PACKAGE_SUGGESTS "tandem-cuda, libcurl4")
set(scripts ${CMAKE_SOURCE_DIR}/deploy/package)
set(CPACK_DEBIAN_TANDEM_PACKAGE_CONTROL_EXTRA
    "${scripts}/conffiles;${scripts}/postinst;${scripts}/prerm;${scripts}/postrm")
set(CPACK_DEBIAN_TANDEM_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_CUDA_PACKAGE_NAME tandem-cuda)
set(CPACK_DEBIAN_CUDA_PACKAGE_SECTION net)
set(CPACK_DEBIAN_CUDA_PACKAGE_DEPENDS "tandem (= ${PROJECT_VERSION})")
set(CPACK_COMPONENT_CUDA_DESCRIPTION
    "what tandem's --device cuda loads; wants the NVIDIA driver, cuBLASLt and, with --tp, NCCL")
include(CPack)
