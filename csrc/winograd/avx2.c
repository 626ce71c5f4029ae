/* The steps with AVX2 and FMA: 12 of 16 registers hold sums. */
#include "winograd.h"

#if WINOGRAD_HAS_X86
#define VECTOR_BYTES 32
#define MAX_ROWS 6
#define TARGET __attribute__((target("avx2,fma")))
#define KERNELS winograd_avx2
#include "kernels.h"
#endif
