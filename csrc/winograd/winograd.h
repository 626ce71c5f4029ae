/* Convolutions of 3x3 with stride 1 and padding 1 in fp32, by Winograd's F(4x4, 3x3); the interfaces of its parts.
 *
 * Each tile of 4x4 outputs needs 6x6 inputs. Both transforms are separable, and between them lie 36 matrix products of
 * [tiles, in_channels] by [in_channels, out_channels]: 36 multiplications for 16 outputs instead of 144 (Lavin and Gray,
 * arXiv:1509.09308). Images are NHWC.
 */
#ifndef RECONV_WINOGRAD_H
#define RECONV_WINOGRAD_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define WINOGRAD_HAS_X86 1
#else
#define WINOGRAD_HAS_X86 0
#endif

#define EXPORT __attribute__((visibility("default")))

enum {
    OUTPUT_SIDE = 4,
    INPUT_SIDE = 6,
    NUM_POINTS = INPUT_SIDE * INPUT_SIDE, /* products per tile and pair of channels */
    LINE_FLOATS = 16                      /* of a cache line */
};

/* Where one tile of the output goes: `pixels` is its first one, of which `rows` x `columns` are inside of the image. */
typedef struct {
    float *pixels;
    const float *other; /* added before the ReLU; NULL: nothing */
    ptrdiff_t row_stride, column_stride;
    int rows, columns;
} winograd_output;

/* The three steps for one set of instructions. `multiply` and `transform_output` work on the columns of some panels: a
 * panel has `panel_width` output channels. Strides are in floats. */
typedef struct {
    int panel_width;
    /* From the pixels of a tile, row by row, to its 36 rows of channels in `transformed`. */
    void (*transform_input)(const float *const pixels[NUM_POINTS], int channels, float *transformed, ptrdiff_t stride);
    /* products [tiles, panel] = transformed [tiles, channels] x weights [channels, panel] */
    void (*multiply)(int num_tiles, int channels, const float *transformed, ptrdiff_t transformed_stride,
                     const float *weights, float *products, ptrdiff_t products_stride);
    /* From the 36 rows of products of a tile to its pixels, for `channels` of them. */
    void (*transform_output)(const float *products, ptrdiff_t stride, const float *bias, int channels, int apply_relu,
                             const winograd_output *output);
} winograd_kernels;

extern const winograd_kernels winograd_plain;
#if WINOGRAD_HAS_X86
extern const winograd_kernels winograd_avx2, winograd_avx512;
#endif

#endif
