# The project is C. C++ compiles the .cu files for the emulated GPU of the tests; CUDA is asked for
# with TANDEM_CUDA=ON. Neither is needed for anything else.
if(TANDEM_TESTS AND NOT CMAKE_CXX_COMPILER)
  # The sibling of the C compiler: the two must agree on sanitizers.
  if(CMAKE_C_COMPILER MATCHES "^(.*)clang(-[0-9.]+)?$")
    set(sibling "${CMAKE_MATCH_1}clang++${CMAKE_MATCH_2}")
  elseif(CMAKE_C_COMPILER MATCHES "^(.*)gcc(-[0-9.]+)?$")
    set(sibling "${CMAKE_MATCH_1}g++${CMAKE_MATCH_2}")
  elseif(CMAKE_C_COMPILER MATCHES "^(.*/)cc$")
    set(sibling "${CMAKE_MATCH_1}c++")
  endif()
  if(sibling AND EXISTS "${sibling}")
    set(CMAKE_CXX_COMPILER "${sibling}" CACHE FILEPATH "C++ compiler of the emulated GPU")
  endif()
endif()
if(TANDEM_TESTS AND CMAKE_CXX_COMPILER)
  enable_language(CXX)
endif()

if(TANDEM_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR
        "TANDEM_CUDA=ON: no nvcc found. Put CUDA's bin folder on PATH or name it: -DCMAKE_CUDA_COMPILER=/usr/local/cuda/bin/nvcc. "
                        "Without it configure with TANDEM_CUDA=OFF: everything else builds, and --device cuda says what is missing.")
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real) # kernels/cuda sets its own; CMake wants one
  endif()
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
    message(FATAL_ERROR
        "TANDEM_CUDA=ON: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, must be 12.0 or newer (sm_90a).")
  endif()
endif()
