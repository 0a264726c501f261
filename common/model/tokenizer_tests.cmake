td_test(tokenizer_test SOURCES ${CMAKE_SOURCE_DIR}/tests/unit/tokenizer_test.c DEPS td_model THREADED *threads*)
td_fuzzer(tokenizer_fuzz SOURCES ${CMAKE_SOURCE_DIR}/tests/fuzz/tokenizer_fuzz.c DEPS td_model)
