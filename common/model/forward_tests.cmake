td_test(tinystories_test SOURCES ${CMAKE_SOURCE_DIR}/tests/golden/tinystories_test.c DEPS td_model LABELS golden)
td_test(golden_test SOURCES ${CMAKE_SOURCE_DIR}/tests/golden/golden_test.c DEPS td_model LABELS golden)
