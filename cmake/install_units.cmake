# Runs when things are installed: systemd units and their settings, with the paths of
# CMAKE_INSTALL_PREFIX as it is then. `source` is deploy/systemd.
set(PREFIX "${CMAKE_INSTALL_PREFIX}")
set(SETTINGS "${PREFIX}/etc/tandem")
if(PREFIX STREQUAL "/usr")
  set(SETTINGS /etc/tandem)
endif()
foreach(unit tandem-router.service tandem-prefill@.service tandem-decode@.service)
  configure_file("${source}/${unit}.in" "$ENV{DESTDIR}${PREFIX}/lib/systemd/system/${unit}" @ONLY)
  message(STATUS "Installing: $ENV{DESTDIR}${PREFIX}/lib/systemd/system/${unit}")
endforeach()
configure_file("${source}/tandem.env.in" "$ENV{DESTDIR}${SETTINGS}/tandem.env" @ONLY)
message(STATUS "Installing: $ENV{DESTDIR}${SETTINGS}/tandem.env")
