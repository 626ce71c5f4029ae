/* The three steps of a convolution, for one set of vector instructions.
 *
 * A file that includes this one defines VECTOR_BYTES, MAX_ROWS (of tiles whose sums fill the registers together with
 * PANEL_VECTORS vectors each), TARGET (the attribute of functions) and KERNELS (the name of the table).
 *
 * Every output is the sum over its channels in order, whatever the number of tiles, so its bits depend neither on the
 * batch nor on how work is divided.
 */
#include "winograd.h"

#include <string.h>

enum { WIDTH = VECTOR_BYTES / 4, PANEL_VECTORS = 2, PANEL_WIDTH = PANEL_VECTORS * WIDTH };

typedef float vector __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vector_bits __attribute__((vector_size(VECTOR_BYTES)));
typedef float unaligned_vector __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE vector load(const float *from) { return *(const unaligned_vector *)from; }
INLINE void store(float *to, vector value) { *(unaligned_vector *)to = value; }

/* Polynomials are evaluated at 0, +-P, +-Q and infinity. With sqrt(1/2) and sqrt(2) rounding errors are about half of those
 * with the usual 1 and 2. The weights of winograd.py must be transformed with the same points. */
#define P 0.70710678118654752f
#define Q 1.41421356237309505f
#define P2 0.5f
#define Q2 2.0f
#define P3 0.35355339059327376f
#define Q3 2.82842712474619010f

/* Six values of a row or column to six transformed ones, `stride` floats apart. */
INLINE void transform_six(const vector d[INPUT_SIDE], float *to, ptrdiff_t stride) {
    vector even_p = d[4] - Q2 * d[2], odd_p = d[3] - Q2 * d[1];
    vector even_q = d[4] - P2 * d[2], odd_q = d[3] - P2 * d[1];
    store(to, d[0] + d[4] - (P2 + Q2) * d[2]);
    store(to + stride, even_p + P * odd_p);
    store(to + 2 * stride, even_p - P * odd_p);
    store(to + 3 * stride, even_q + Q * odd_q);
    store(to + 4 * stride, even_q - Q * odd_q);
    store(to + 5 * stride, d[1] + d[5] - (P2 + Q2) * d[3]);
}

/* One vector of channels of a tile. */
INLINE void transform_patch(const float *const pixels[NUM_POINTS], int channel, float *transformed, ptrdiff_t stride) {
    float columns[NUM_POINTS * WIDTH] __attribute__((aligned(VECTOR_BYTES)));
    vector d[INPUT_SIDE];
    for (int x = 0; x < INPUT_SIDE; x++) {
        for (int y = 0; y < INPUT_SIDE; y++) d[y] = load(pixels[y * INPUT_SIDE + x] + channel);
        transform_six(d, columns + x * WIDTH, INPUT_SIDE * WIDTH);
    }
    for (int y = 0; y < INPUT_SIDE; y++) {
        for (int x = 0; x < INPUT_SIDE; x++) d[x] = load(columns + (y * INPUT_SIDE + x) * WIDTH);
        transform_six(d, transformed + y * INPUT_SIDE * stride, stride);
    }
}

static TARGET void transform_input(const float *const pixels[NUM_POINTS], int channels, float *transformed,
                                   ptrdiff_t stride) {
    int channel = 0;
    for (; channel + WIDTH <= channels; channel += WIDTH)
        transform_patch(pixels, channel, transformed + channel, stride);
    if (channel == channels) return;
    float last[NUM_POINTS][WIDTH] = {{0}}; /* a whole vector could end behind the image */
    const float *rows[NUM_POINTS];
    for (int point = 0; point < NUM_POINTS; point++) {
        memcpy(last[point], pixels[point] + channel, sizeof(float) * (size_t)(channels - channel));
        rows[point] = last[point];
    }
    transform_patch(rows, 0, transformed + channel, stride);
}

/* `rows` is a constant wherever this is inlined, so that all sums stay in registers. */
INLINE void multiply_rows(const int rows, int channels, const float *transformed, ptrdiff_t transformed_stride,
                          const float *weights, float *products, ptrdiff_t products_stride) {
    vector sums[MAX_ROWS][PANEL_VECTORS];
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < PANEL_VECTORS; column++) sums[row][column] = (vector){0};
    for (int channel = 0; channel < channels; channel++) {
        vector left = load(weights), right = load(weights + WIDTH);
        weights += PANEL_WIDTH;
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            float value = transformed[row * transformed_stride + channel];
            sums[row][0] += value * left;
            sums[row][1] += value * right;
        }
    }
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < PANEL_VECTORS; column++)
            store(products + row * products_stride + column * WIDTH, sums[row][column]);
}

static TARGET void multiply(int num_tiles, int channels, const float *transformed, ptrdiff_t transformed_stride,
                            const float *weights, float *products, ptrdiff_t products_stride) {
    int num_groups = (num_tiles + MAX_ROWS - 1) / MAX_ROWS; /* of nearly equal size: 16 tiles are 8 and 8, not 12 and 4 */
    for (int group = 0; group < num_groups; group++) {
        int rows = num_tiles / num_groups + (group < num_tiles % num_groups);
        switch (rows) {
#define ROWS(n) \
    case n: multiply_rows(n, channels, transformed, transformed_stride, weights, products, products_stride); break;
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if MAX_ROWS > 6
            ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
        }
        transformed += rows * transformed_stride;
        products += rows * products_stride;
    }
}

/* Six products to four outputs. */
INLINE void combine_six(const vector m[INPUT_SIDE], vector y[OUTPUT_SIDE]) {
    vector sum_p = m[1] + m[2], difference_p = m[1] - m[2], sum_q = m[3] + m[4], difference_q = m[3] - m[4];
    y[0] = m[0] + sum_p + sum_q;
    y[1] = P * difference_p + Q * difference_q;
    y[2] = P2 * sum_p + Q2 * sum_q;
    y[3] = P3 * difference_p + Q3 * difference_q + m[5];
}

/* `count` channels of a pixel; NaN stays NaN. */
INLINE void finish_pixel(vector value, const float *other, int apply_relu, int count, float *pixel) {
    float part[WIDTH] __attribute__((aligned(VECTOR_BYTES))) = {0};
    if (other != NULL) {
        if (count < WIDTH) memcpy(part, other, sizeof(float) * (size_t)count);
        value += load(count < WIDTH ? part : other);
    }
    if (apply_relu) value = (vector)((vector_bits)value & ~(value < (vector){0}));
    if (count == WIDTH) {
        store(pixel, value);
    } else {
        store(part, value);
        memcpy(pixel, part, sizeof(float) * (size_t)count);
    }
}

INLINE void combine_patch(const float *products, ptrdiff_t stride, vector bias, int channel, int count, int apply_relu,
                          const winograd_output *output) {
    vector columns[OUTPUT_SIDE][INPUT_SIDE], m[INPUT_SIDE], y[OUTPUT_SIDE];
    for (int x = 0; x < INPUT_SIDE; x++) {
        for (int point = 0; point < INPUT_SIDE; point++) m[point] = load(products + (point * INPUT_SIDE + x) * stride);
        combine_six(m, y);
        for (int row = 0; row < OUTPUT_SIDE; row++) columns[row][x] = y[row];
    }
    for (int row = 0; row < output->rows; row++) {
        combine_six(columns[row], y);
#pragma GCC unroll 4
        for (int column = 0; column < OUTPUT_SIDE; column++) {
            ptrdiff_t offset = row * output->row_stride + column * output->column_stride + channel;
            if (column < output->columns)
                finish_pixel(y[column] + bias, output->other == NULL ? NULL : output->other + offset, apply_relu, count,
                             output->pixels + offset);
        }
    }
}

static TARGET void transform_output(const float *products, ptrdiff_t stride, const float *bias, int channels,
                                    int apply_relu, const winograd_output *output) {
    int channel = 0;
    for (; channel + WIDTH <= channels; channel += WIDTH)
        combine_patch(products + channel, stride, load(bias + channel), channel, WIDTH, apply_relu, output);
    if (channel < channels) {
        float last[WIDTH] __attribute__((aligned(VECTOR_BYTES))) = {0};
        memcpy(last, bias + channel, sizeof(float) * (size_t)(channels - channel));
        combine_patch(products + channel, stride, load(last), channel, channels - channel, apply_relu, output);
    }
}

const winograd_kernels KERNELS = {PANEL_WIDTH, transform_input, multiply, transform_output};
