list(APPEND TD_MODEL_SOURCES sampler.c)
list(APPEND TD_MODEL_DEPS td_base)
