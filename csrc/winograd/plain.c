/* The steps with the vectors that every processor of the platform has: SSE2 or, on Arm, NEON. */
#define VECTOR_BYTES 16
#define MAX_ROWS 6
#define TARGET
#define KERNELS winograd_plain
#include "kernels.h"
