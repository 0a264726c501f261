td_test(sampler_test SOURCES ${CMAKE_SOURCE_DIR}/tests/unit/sampler_test.c DEPS td_model ONE_THREAD)
if(TARGET cuda_sample_test) # kernels/cuda/emu declares it, for which this library comes later
  target_link_libraries(cuda_sample_test PRIVATE td_model)
endif()
