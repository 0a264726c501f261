td_test(chat_template_test SOURCES ${CMAKE_SOURCE_DIR}/tests/unit/chat_template_test.c DEPS td_model ONE_THREAD)
td_fuzzer(chat_template_fuzz SOURCES ${CMAKE_SOURCE_DIR}/tests/fuzz/chat_template_fuzz.c DEPS td_model)
