/* A baseline JPEG decoder that computes only a resized crop of the image; the interfaces of its parts.
 *
 * JPEG_OTHER means that another decoder must handle the file, never that the file is bad. Results are integers computed
 * alike with and without vector instructions, so the bits do not depend on the processor.
 */
#ifndef RECONV_JPEG_H
#define RECONV_JPEG_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define JPEG_HAS_AVX2 1
#define JPEG_AVX2 __attribute__((target("avx2,bmi,bmi2")))
#else
#define JPEG_HAS_AVX2 0
#endif

#define EXPORT __attribute__((visibility("default")))
#define JPEG_INLINE static inline __attribute__((always_inline))
#define JPEG_LIKELY(condition) __builtin_expect(!!(condition), 1)
#define JPEG_UNLIKELY(condition) __builtin_expect(!!(condition), 0)

enum { JPEG_DONE = 0, JPEG_OTHER = 1 };

/* Memory that lives for one call, kept by the thread for its next one. */
typedef struct jpeg_arena jpeg_arena;
void *jpeg_take(jpeg_arena *arena, size_t size_bytes); /* aligned to 64; NULL: no memory */

/* header.c */

typedef struct {
    uint8_t counts[17]; /* codes of each length */
    uint8_t symbols[256];
    int num_symbols; /* 0: the table was not defined */
} jpeg_codes;

typedef struct {
    int id;
    int across, down; /* sampling factors */
    int quantiser;
    int dc_codes, ac_codes;
} jpeg_component;

typedef struct {
    int width, height;
    int num_components; /* 1 or 3 */
    int max_across, max_down;
    jpeg_component components[3];
    uint16_t quantisers[4][64]; /* in zigzag order */
    int has_quantiser[4];
    jpeg_codes dc[4], ac[4];
    int restart_interval; /* in MCUs; 0: none */
    size_t scan_start;    /* where entropy-coded data begins */
} jpeg_header;

int jpeg_read_header(const uint8_t *data, size_t size, jpeg_header *header);

/* scan.c */

#define JPEG_LOOKUP_BITS 11
#define JPEG_SKIP_BITS 12

typedef struct {
    uint8_t counts[17];
    uint8_t symbols[256];
    int num_symbols;
    int has_skips;
    uint32_t steps[1 << JPEG_LOOKUP_BITS]; /* see scan.c */
    uint16_t skips[1 << JPEG_SKIP_BITS];
    int32_t last_code[18]; /* beyond the last code of each length, left-aligned to 16 bits */
    int32_t offset[17];
} jpeg_lookup;

typedef struct {
    const uint8_t *bytes; /* without stuffing, followed by JPEG_SCAN_PADDING zeros */
    size_t num_segments;
    const size_t *ends; /* of each segment between restart markers */
} jpeg_scan;

#define JPEG_SCAN_PADDING 2048 /* more than one damaged MCU can read: 6 blocks of 64 codes of at most 27 bits */

int jpeg_unstuff(const uint8_t *data, size_t size, size_t num_segments, jpeg_arena *arena, jpeg_scan *scan);
int jpeg_build_lookup(const jpeg_codes *codes, int is_dc, jpeg_lookup *lookup);
void jpeg_build_skips(jpeg_lookup *lookup);

/* One component's part of the rectangle of blocks that is turned into pixels, a row of MCUs at a time. */
typedef struct {
    int across, down;
    _Alignas(32) int16_t quantiser[64]; /* in the order of the block */
    const jpeg_lookup *dc, *ac;
    uint8_t *strip; /* 8 * down rows */
    ptrdiff_t stride;
} jpeg_plane;

typedef struct {
    int num_planes;
    jpeg_plane planes[3];
    int mcus_across, mcus_down;
    int left, right, top, bottom; /* the MCUs needed, right and bottom excluded */
    int restart_interval;
} jpeg_frame;

typedef void jpeg_idct(const int16_t *block, const int16_t *quantiser, uint8_t *out, ptrdiff_t stride);
typedef void jpeg_row_done(void *user, int mcu_row);

/* Decode up to the last MCU needed; `done` is called after each row of MCUs that is needed. */
int jpeg_decode_scan(const jpeg_frame *frame, const jpeg_scan *scan, int use_avx2, jpeg_row_done *done, void *user);

/* idct.c */

extern const uint8_t jpeg_block_order[64]; /* where the block keeps each coefficient of the zigzag order */
jpeg_idct jpeg_idct_plain;
#if JPEG_HAS_AVX2
jpeg_idct jpeg_idct_avx2;
#endif

/* weights.c */

enum { JPEG_BILINEAR = 0, JPEG_BICUBIC = 1 };

#define JPEG_WEIGHT_BITS 14

/* How each output sample is made of consecutive input samples, along one axis of one plane. */
typedef struct {
    int num_outputs;
    int num_taps;   /* even; what is not needed weighs 0 */
    int *starts;    /* the first input of each output */
    int16_t *weights; /* [num_outputs, num_taps], each row sums to 1 << JPEG_WEIGHT_BITS */
    int first, last; /* the inputs needed, last excluded */
} jpeg_axis;

typedef struct {
    double low, high;    /* the box, in samples of the full-size plane */
    int floor, ceiling;  /* inputs outside are never read */
    int length;          /* of the image */
    int num_outputs;
    int is_antialiased, filter;
    int is_smooth; /* halved planes are interpolated, not repeated */
} jpeg_request;

int jpeg_make_axis(const jpeg_request *request, int is_halved, jpeg_arena *arena, jpeg_axis *axis);

/* resize.c */

#define JPEG_FRACTION_BITS 6 /* of samples between the two passes and before colour conversion */

typedef struct {
    int num_groups; /* of 8 outputs */
    int *offsets;   /* [num_groups, 2]: where the first 4 and the last 4 outputs begin to read */
    uint8_t *shuffles; /* [num_groups, 32] */
    int16_t *weights;  /* [num_groups, num_taps / 2, 16] */
} jpeg_groups;

typedef struct {
    jpeg_axis axis;
    jpeg_groups groups; /* num_groups is 0 where outputs lie too far apart */
} jpeg_across;

int jpeg_group(jpeg_across *across, jpeg_arena *arena);
/* `row` holds input `origin` first, and 32 readable bytes after the last needed one. */
void jpeg_resize_row(const jpeg_across *across, const uint8_t *row, int origin, int16_t *out, int use_avx2);
/* `rows` holds input row `axis->first` first. */
void jpeg_resize_column(
    const jpeg_axis *down, int output, const int16_t *rows, size_t stride, int width, int16_t *out, int use_avx2);
/* `cb` and `cr` are NULL for grey. */
void jpeg_colour(
    const int16_t *y, const int16_t *cb, const int16_t *cr, int width, uint8_t *red, uint8_t *green, uint8_t *blue,
    int use_avx2);

/* decode.c */

int reconv_jpeg_size(const uint8_t *data, size_t size, int32_t size_out[2]);
int reconv_jpeg_crop(
    const uint8_t *data, size_t size, double left, double top, double right, double bottom, int is_cut, uint8_t *out,
    int height, int width, int is_interleaved, int is_antialiased, int filter, int may_use_avx2);

/* task.c */

typedef struct jpeg_job {
    const uint8_t *const *files;
    const int64_t *lengths;
    int num_files;
    const double *boxes;
    int is_cut;
    uint8_t *out;
    int size, is_antialiased, filter;
    uint8_t *is_done;
    /* pool.c */
    int next, num_left; /* the next file to crop, and how many are not cropped yet */
    struct jpeg_job *later;
    pthread_cond_t has_ended;
} jpeg_job;

void jpeg_crop_file(jpeg_job *job, int file);

/* boxes.c */

typedef struct {
    double min_scale, max_scale; /* of the area */
    double min_ratio, max_ratio; /* width / height */
    int num_attempts, falls_back_to_whole;
} jpeg_crop_rule;

/* pool.c */

/* Crops the files of a job in up to `wanted_threads` threads, in this one where that is 1; returns when all are done. */
void jpeg_run_job(jpeg_job *job, int wanted_threads);

#endif
