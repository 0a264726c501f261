list(APPEND TD_MODEL_SOURCES chat_template.c jinja.c)
list(APPEND TD_MODEL_DEPS td_base)
