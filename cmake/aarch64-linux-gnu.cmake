# For aarch64 on another machine, with Debian's cross compiler (gcc-aarch64-linux-gnu) and a root of
# the distribution with the libraries (scripts/bare-root make debian12-arm64 ROOT):
#
#   cmake --preset release -B build/arm64 --toolchain cmake/aarch64-linux-gnu.cmake
#       -DCMAKE_SYSROOT=ROOT
#
# The programs run in that root, or by qemu-aarch64 -L ROOT. There is no C++ and so no emulated GPU:
# its tests are the same on every host, and slow enough on one.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)

# Programs that run during the build are this machine's; libraries and headers are the root's.
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${CMAKE_SYSROOT})
set(ENV{PKG_CONFIG_LIBDIR}
    ${CMAKE_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig:${CMAKE_SYSROOT}/usr/share/pkgconfig)
