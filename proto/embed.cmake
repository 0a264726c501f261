# IN -> OUT: the bytes of IN as a C array SYM and its size SYM_bytes.
file(READ "${IN}" hex HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
string(REGEX REPLACE
    "(0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,)" "\\1\n"
    bytes "${bytes}")
file(WRITE "${OUT}"
    "#include \"proto/descriptor_set.h\"\nconst unsigned char ${SYM}[] = {\n${bytes}};\n"
  "const size_t ${SYM}_bytes = sizeof ${SYM};\n")
