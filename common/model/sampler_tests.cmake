td_test(sampler_test SOURCES ${CMAKE_SOURCE_DIR}/tests/unit/sampler_test.c DEPS td_model ONE_THREAD)
