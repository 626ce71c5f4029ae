/* The steps with AVX-512: 24 of 32 registers hold sums. */
#include "winograd.h"

#if WINOGRAD_HAS_X86
#define VECTOR_BYTES 64
#define MAX_ROWS 12
#define TARGET __attribute__((target("avx512f")))
#define KERNELS winograd_avx512
#include "kernels.h"
#endif
