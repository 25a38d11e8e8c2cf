// Everything of ggml that is bound. `cargo xtask bindgen` and the feature `bindgen` read this file.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-rpc.h"
#include "gguf.h"

// What a backend implementation needs: the structs of function pointers behind every handle.
#include "ggml-backend-impl.h"
