list(APPEND TD_MODEL_SOURCES config.c model_dir.c safetensors.c weights.c model.c forward.c forward_device.c)
