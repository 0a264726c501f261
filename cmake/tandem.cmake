# What every target shares: C17, warnings as errors, sanitizers, and the three ways to declare a
# target.
set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo)
endif()
set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O2 -g")
# -O2 for what runs too: the kernels are written out by hand, and at -O3 gcc's warnings about bounds
# see paths that cannot be taken. Fortify also turns ignored results of read, write and their like
# into errors, as Ubuntu's compiler does by default. -g1 is functions and lines, which a backtrace
# needs; of gcc's time for the attention kernels, half went into following their locals.
# RelWithDebInfo has those.
set(CMAKE_C_FLAGS_RELEASE "-O2 -g1 -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2")
# The sanitizer builds. Their reports need functions and lines; locals too cost a quarter of the
# compiler's time.
set(CMAKE_C_FLAGS_DEBUG "-O1 -g1 -U_FORTIFY_SOURCE")
# Test programs are a third of all C here, and what they do themselves is set up and compare: -O1,
# from which on gcc warns of ignored results, what its warnings of bounds need besides, and lines.
# The libraries under test keep the flags of their build.
set(TD_TEST_OPTIONS -O1 $<$<AND:$<C_COMPILER_ID:GNU>,$<NOT:$<CONFIG:Debug>>>:-ftree-vrp> -g1)

foreach(type RELWITHDEBINFO RELEASE DEBUG)
  set(CMAKE_CXX_FLAGS_${type} "${CMAKE_C_FLAGS_${type}}")
endforeach()

# ccache, where it is installed: a second clone, or a branch gone back to, compiles what has changed.
# Paths are given to it relative to the tree, so that clones in several folders share objects; lines
# of a backtrace are relative, too. -DCMAKE_C_COMPILER_LAUNCHER= builds without it.
find_program(TD_CCACHE ccache)
if(TD_CCACHE)
  foreach(language C CXX CUDA)
    set(CMAKE_${language}_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=locale ${TD_CCACHE}
      CACHE STRING "What runs the compiler")
  endforeach()
endif()

find_package(Threads REQUIRED)
include(CheckLinkerFlag)

add_library(td_flags INTERFACE)
target_compile_definitions(td_flags INTERFACE _GNU_SOURCE TD_VERSION="${PROJECT_VERSION}")
# -ffp-contract=off: the same C must give the same bits in every build and file; kernels that want
# FMA say so.
target_compile_options(td_flags INTERFACE -Wall -Wextra -Werror -Wshadow -Wvla
  $<$<COMPILE_LANGUAGE:C>:-Wstrict-prototypes> $<$<COMPILE_LANGUAGE:C>:-Wmissing-prototypes>
  -fno-strict-aliasing -fno-common -ffp-contract=off
  # snprintf into a bounded message may cut it: that is what it is for.
  $<$<C_COMPILER_ID:GNU>:-Wno-format-truncation>
  # gcc cannot know that td_fail() answers non-zero, so many an `if (s) return s;` before a use
  # looks doubtful to it, differently in each version and at each -O. clang's analysis of paths
  # (-Wsometimes-uninitialized) stays on and make check builds with clang.
  $<$<C_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
target_include_directories(td_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_link_libraries(td_flags INTERFACE Threads::Threads m)
if(TANDEM_SANITIZE)
  target_compile_options(td_flags INTERFACE -fsanitize=${TANDEM_SANITIZE} -fno-omit-frame-pointer
      -fno-sanitize-recover=all)
  target_link_options(td_flags INTERFACE -fsanitize=${TANDEM_SANITIZE})
  # lld, where there is one, links these large programs in a third of the usual linker's time. What
  # is installed keeps the usual one.
  check_linker_flag(C -fuse-ld=lld TD_HAVE_LLD)
  if(TD_HAVE_LLD)
    target_link_options(td_flags INTERFACE -fuse-ld=lld)
  endif()
endif()
if(TANDEM_FUZZ)
  if(NOT CMAKE_C_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR
        "TANDEM_FUZZ needs clang: libFuzzer is its part (cmake --preset fuzz, or -DCMAKE_C_COMPILER=clang)")
  endif()
  target_compile_options(td_flags INTERFACE -fsanitize=fuzzer-no-link)
  target_link_options(td_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
set(TANDEM_FUZZ_SECONDS 5 CACHE STRING "How long ctest runs each fuzzer")
set(TANDEM_FUZZ_SEED 0 CACHE STRING "Seed of the fuzzers' random numbers; 0: another one in every run")
# all of them, and nothing else: cmake --build build/fuzz --target fuzzers
add_custom_target(fuzzers)

# td_test_environment(NAME [VAR=VALUE ...]): what every test sees, whatever started ctest.
set(TANDEM_TEST_ENVIRONMENT
  "UBSAN_OPTIONS=print_stacktrace=1"
  "LSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/tests/sanitizers/lsan.supp:print_suppressions=0"
  "TSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/tests/sanitizers/tsan.supp:print_suppressions=0:second_deadlock_stack=1")
function(td_test_environment name)
  set_tests_properties(${name} PROPERTIES ENVIRONMENT "${TANDEM_TEST_ENVIRONMENT};${ARGN}")
endfunction()

# td_library(NAME SOURCES... [DEPS ...] [NOT_FUZZED ...]): a static library td_NAME. Including
# "common/x/y.h" works from the root. NOT_FUZZED: sources that no fuzzer links; builds of the
# fuzzers leave them out, so a fuzzer that comes to need one says so when it is linked.
function(td_library name)
  cmake_parse_arguments(A "" "" "SOURCES;DEPS;NOT_FUZZED" ${ARGN})
  if(TANDEM_FUZZ AND A_NOT_FUZZED)
    list(REMOVE_ITEM A_SOURCES ${A_NOT_FUZZED})
  endif()
  add_library(${name} STATIC ${A_SOURCES})
  target_link_libraries(${name} PUBLIC td_flags ${A_DEPS})
endfunction()

# td_program(NAME SOURCES... DEPS...)
function(td_program name)
  cmake_parse_arguments(A "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${A_SOURCES})
  target_link_libraries(${name} PRIVATE td_flags ${A_DEPS})
endfunction()

# td_not_sanitized(NAME...): no test runs these programs, so builds with sanitizers make them only
# when they are named.
function(td_not_sanitized)
  if(TANDEM_SANITIZE)
    set_target_properties(${ARGN} PROPERTIES EXCLUDE_FROM_ALL TRUE)
  endif()
endfunction()

# td_test(NAME SOURCES... DEPS... [LABELS ...] [TIMEOUT s] [ONE_THREAD | THREADED pattern]): a
# cmocka program and its ctest entry. TANDEM_DATA names shared/data. ONE_THREAD: it starts no
# thread, so ThreadSanitizer could only slow it down; such builds leave it out. THREADED: they run
# only those of its tests whose names match; its main takes a pattern.
function(td_test name)
  cmake_parse_arguments(A "ONE_THREAD" "TIMEOUT;THREADED" "SOURCES;DEPS;LABELS;RUNS" ${ARGN})
  if(NOT TANDEM_TESTS OR (A_ONE_THREAD AND TANDEM_SANITIZE STREQUAL "thread"))
    return()
  endif()
  add_executable(${name} ${A_SOURCES})
  target_link_libraries(${name} PRIVATE td_flags ${A_DEPS} cmocka)
  target_compile_options(${name} PRIVATE ${TD_TEST_OPTIONS})
  # Golden tests are of the optimised build; with a sanitizer they are programs to run by hand, made
  # when they are named.
  if(TANDEM_SANITIZE AND A_LABELS STREQUAL "golden")
    td_not_sanitized(${name})
    return()
  endif()
  set(only)
  if(A_THREADED AND TANDEM_SANITIZE STREQUAL "thread")
    set(only ${A_THREADED})
  endif()
  # RUNS suffix=argument ...: the program runs once for each, as a test of its own, so that they
  # wait beside each other.
  set(tests)
  foreach(run ${A_RUNS})
    string(REGEX MATCH "^([a-z_]+)=(.*)$" run "${run}")
    add_test(NAME ${name}_${CMAKE_MATCH_1} COMMAND ${name} "${CMAKE_MATCH_2}" WORKING_DIRECTORY
        ${CMAKE_SOURCE_DIR})
    list(APPEND tests ${name}_${CMAKE_MATCH_1})
  endforeach()
  if(NOT tests)
    add_test(NAME ${name} COMMAND ${name} ${only} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
    set(tests ${name})
  endif()
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 120)
  endif()
  set(cost ${A_TIMEOUT})
  # TIMEOUT is what the test may take with two processors to itself. ctest's is for what hangs, and
  # others may be busy here, too.
  set(patience 3)
  if(TANDEM_SANITIZE) # they cost a factor of 2 to 15
    set(patience 8)
  elseif(CMAKE_CROSSCOMPILING) # the tests run under emulation
    set(patience 12)
  endif()
  math(EXPR A_TIMEOUT "${A_TIMEOUT} * ${patience}")
  if(NOT A_LABELS)
    set(A_LABELS unit)
  endif()
  foreach(test ${tests})
    set_tests_properties(${test} PROPERTIES TIMEOUT ${A_TIMEOUT} LABELS "${A_LABELS}"
        SKIP_RETURN_CODE 77
      COST ${cost}) # the long ones first
    td_test_environment(${test})
  endforeach()
endfunction()

# td_fuzzer(NAME SOURCES... DEPS...): a libFuzzer program and its ctest entry (label fuzz). Its
# seeds are tests/fuzz/corpus/NAME; what it finds of interest goes to BUILD/corpus/NAME, is kept
# from run to run, and never into the source tree. Only with -DTANDEM_FUZZ=ON (clang).
function(td_fuzzer name)
  cmake_parse_arguments(A "" "" "SOURCES;DEPS" ${ARGN})
  set_property(GLOBAL APPEND PROPERTY TD_FUZZERS ${name})
  if(NOT TANDEM_FUZZ)
    return()
  endif()
  add_executable(${name} ${A_SOURCES})
  target_link_libraries(${name} PRIVATE td_flags ${A_DEPS})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  add_dependencies(fuzzers ${name})
  set(found ${CMAKE_BINARY_DIR}/corpus/${name})
  file(MAKE_DIRECTORY ${found} ${CMAKE_BINARY_DIR}/crashes)
  # a fuzzer without seeds fails: libFuzzer wants the folder
  set(seeds ${CMAKE_SOURCE_DIR}/tests/fuzz/corpus/${name})
  add_test(NAME ${name} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}
    COMMAND ${name} -max_total_time=${TANDEM_FUZZ_SECONDS} -seed=${TANDEM_FUZZ_SEED}
        -timeout=10 -rss_limit_mb=2048 -print_final_stats=1
            -artifact_prefix=${CMAKE_BINARY_DIR}/crashes/${name}- ${found} ${seeds})
  math(EXPR limit_s "${TANDEM_FUZZ_SECONDS} + 120")
  set_tests_properties(${name} PROPERTIES TIMEOUT ${limit_s} LABELS fuzz)
  td_test_environment(${name})
endfunction()
