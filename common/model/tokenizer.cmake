find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
list(APPEND TD_MODEL_SOURCES tokenizer.c tokenizer_parts.c tokenizer_text.c tokenizer_regex.c tokenizer_normalize.c tokenizer_added.c
  tokenizer_split.c tokenizer_bpe.c tokenizer_encode.c tokenizer_decode.c)
list(APPEND TD_MODEL_DEPS PkgConfig::PCRE2 PkgConfig::UTF8PROC)
