# Joins the page's sources into one file, and that into C: cmake -DFROM=DIR -DTO=FILE.c -P this.
file(READ ${FROM}/page.html page)
file(READ ${FROM}/page.css css)
file(READ ${FROM}/page.js js)
string(REPLACE "@CSS@" "${css}" page "${page}")
string(REPLACE "@JS@" "${js}" page "${page}")
file(WRITE ${TO}.html "${page}")
file(READ ${TO}.html hex HEX)
string(LENGTH "${hex}" n_digits)
math(EXPR n_bytes "${n_digits} / 2")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
file(WRITE ${TO} "#include <stddef.h>
extern const unsigned char router_page_bytes[];
extern const size_t router_page_n_bytes;
const unsigned char router_page_bytes[] = {${bytes}};
const size_t router_page_n_bytes = ${n_bytes};
")
