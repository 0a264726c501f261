#include "bench/serve/run_flight.h"
const struct run_backend run_http = {.name = "openai"};
