td_test(tinystories_test SOURCES ${CMAKE_SOURCE_DIR}/tests/golden/tinystories_test.c DEPS td_model LABELS golden)
