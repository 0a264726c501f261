# IN -> OUT, the copy that C is generated from. (1) `string` becomes `bytes` on lines marked
# "as-bytes": the wire format is the same; in C such a field keeps its length, so text with a NUL in
# it is not cut short by a C string. (2) services are dropped: rpc.h has its own method tables, and
# a method may be named like a C keyword (Register).
file(READ "${IN}" text)
string(REGEX REPLACE "(\n *|\n *repeated )string ([a-z0-9_]+ = [0-9]+;[^\n]*as-bytes)"
    "\\1bytes \\2" text "${text}")
if(text MATCHES "string [a-z0-9_]+ = [^\n]*as-bytes")
  message(FATAL_ERROR "${IN}: a line marked as-bytes was not understood: ${CMAKE_MATCH_0}")
endif()
string(REGEX REPLACE "\nservice [A-Za-z]+ {[^}]*}" "" text "${text}")
file(WRITE "${OUT}" "${text}")
