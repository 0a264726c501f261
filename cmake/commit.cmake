# commit.cmake - writes OUT, a header with TD_COMMIT: the commit of the tree DIR, with a "+" behind it
# when files differ from it; "" where there is no git tree. Run at each build, because no rule can
# know that a commit was made; the file is written only when it says something new.
execute_process(COMMAND git -C ${DIR} rev-parse --short=12 HEAD OUTPUT_VARIABLE commit
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
execute_process(COMMAND git -C ${DIR} rev-parse --show-toplevel OUTPUT_VARIABLE top
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
# a tree that was unpacked below somebody else's has not that one's commit
if(NOT failed EQUAL 0 OR NOT top STREQUAL DIR)
  set(commit "")
else()
  execute_process(COMMAND git -C ${DIR} diff --quiet HEAD ERROR_QUIET RESULT_VARIABLE differs)
  if(NOT differs EQUAL 0)
    string(APPEND commit "+")
  endif()
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#define TD_COMMIT \"${commit}\"\n")
