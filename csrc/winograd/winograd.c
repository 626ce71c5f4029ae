/* A convolution: its division into tasks, and the calls from Python.
 *
 * A task is a block of tiles and a range of panels of output channels. What it keeps between its steps fits into the L2
 * cache: 36 rows of input channels and of some panels for each tile. Threads take tasks from a counter, and transform the
 * input of a block again where its panels are divided among them.
 */
#include "winograd.h"

#include <stdatomic.h>
#include <string.h>

enum { VERSION = 1 }; /* of the calls and of the layout of weights */

/* With blocks of 12 to 64 tiles and 1 to 4 panels the time of a layer of ResNet-50 differed by up to 15 %. */
enum {
    MAX_BLOCK = 36,    /* tiles */
    MIN_BLOCK = 16,    /* tiles: smaller blocks read the weights too often, */
    LEAST_BLOCK = 4,   /* but keep more threads busy */
    PANELS_AT_ONCE = 2 /* whose products are kept at once */
};

enum { PLAIN, AVX2, AVX512 };

typedef void parallel_function(void (*run)(void *), void *data, unsigned num_threads, unsigned flags);

/* Fields as `ConvolutionCall` of winograd.py. */
typedef struct {
    const float *input;   /* [batch, height, width, in_channels] */
    const float *weights; /* [panels, 36, in_channels, panel_width] */
    const float *bias;    /* [out_channels] */
    const float *other;   /* as output, added before the ReLU; NULL: nothing */
    float *output;        /* [batch, height, width, out_channels] */
    float *workspace;     /* `reconv_winograd_workspace` floats for each thread, aligned to 64 bytes */
    parallel_function *parallel; /* GOMP_parallel, for several threads */
    int64_t batch;
    int32_t height, width, in_channels, out_channels;
    int32_t apply_relu, num_threads, instructions;
} convolution_call;

typedef struct {
    const convolution_call *call;
    const winograd_kernels *kernels;
    int tiles_down, tiles_across, num_panels;
    int64_t num_tiles, num_blocks, num_tasks;
    int num_splits; /* of the panels of a block */
    atomic_llong next_task;
    atomic_int next_thread;
} convolution;

/* The part of the workspace that belongs to one thread. */
typedef struct {
    float *zeros;       /* [in_channels]: a pixel outside of the image */
    float *transformed; /* [36, block, in_channels], with the strides below */
    float *products;    /* [36, block, PANELS_AT_ONCE * panel_width] */
    ptrdiff_t tile_stride, point_stride, product_tile_stride, product_point_stride;
} buffers;

static const winograd_kernels *kernels_of(int instructions) {
#if WINOGRAD_HAS_X86
    if (instructions == AVX512) return &winograd_avx512;
    if (instructions == AVX2) return &winograd_avx2;
#endif
    return instructions == PLAIN ? &winograd_plain : NULL;
}

static ptrdiff_t round_up(ptrdiff_t number, ptrdiff_t step) { return (number + step - 1) / step * step; }

/* The strides of a thread's buffers. A cache line more per row keeps rows of 1 or 2 KiB out of the same cache sets. */
static buffers strides_of(int in_channels, int panel_width) {
    buffers own = {.tile_stride = round_up(in_channels, LINE_FLOATS) + LINE_FLOATS,
                   .product_tile_stride = round_up(PANELS_AT_ONCE * panel_width, LINE_FLOATS) + LINE_FLOATS};
    own.point_stride = MAX_BLOCK * own.tile_stride + LINE_FLOATS;
    own.product_point_stride = MAX_BLOCK * own.product_tile_stride + LINE_FLOATS;
    return own;
}

static ptrdiff_t size_of(const buffers *own) {
    return own->tile_stride + NUM_POINTS * (own->point_stride + own->product_point_stride);
}

static buffers buffers_of(const convolution *all, int thread) {
    buffers own = strides_of(all->call->in_channels, all->kernels->panel_width);
    own.zeros = all->call->workspace + thread * size_of(&own);
    own.transformed = own.zeros + own.tile_stride;
    own.products = own.transformed + NUM_POINTS * own.point_stride;
    memset(own.zeros, 0, sizeof(float) * (size_t)all->call->in_channels);
    return own;
}

static int64_t first_tile(const convolution *all, int64_t block) { return block * all->num_tiles / all->num_blocks; }

typedef struct {
    int64_t image;
    int top, left; /* of its output */
} tile_place;

static tile_place place_of(const convolution *all, int64_t tile) {
    int64_t per_image = (int64_t)all->tiles_down * all->tiles_across, in_image = tile % per_image;
    return (tile_place){tile / per_image, (int)(in_image / all->tiles_across) * OUTPUT_SIDE,
                        (int)(in_image % all->tiles_across) * OUTPUT_SIDE};
}

static int64_t pixel_of(const convolution_call *call, int64_t image, int row, int column) {
    return (image * call->height + row) * call->width + column;
}

static void transform_block(const convolution *all, const buffers *own, int64_t first, int num_tiles) {
    const convolution_call *call = all->call;
    for (int tile = 0; tile < num_tiles; tile++) {
        tile_place at = place_of(all, first + tile);
        const float *pixels[NUM_POINTS];
        for (int point = 0; point < NUM_POINTS; point++) {
            int row = at.top - 1 + point / INPUT_SIDE, column = at.left - 1 + point % INPUT_SIDE;
            int is_inside = row >= 0 && row < call->height && column >= 0 && column < call->width;
            pixels[point] =
                is_inside ? call->input + pixel_of(call, at.image, row, column) * call->in_channels : own->zeros;
        }
        all->kernels->transform_input(pixels, call->in_channels, own->transformed + tile * own->tile_stride,
                                      own->point_stride);
    }
}

/* The products of all tiles of a block with panels from `first` to `last`. */
static void multiply_block(const convolution *all, const buffers *own, int num_tiles, int first, int last) {
    int channels = all->call->in_channels, width = all->kernels->panel_width;
    for (int point = 0; point < NUM_POINTS; point++)
        for (int panel = first; panel < last; panel++)
            all->kernels->multiply(
                num_tiles, channels, own->transformed + point * own->point_stride, own->tile_stride,
                all->call->weights + ((ptrdiff_t)panel * NUM_POINTS + point) * channels * width,
                own->products + point * own->product_point_stride + (panel - first) * width, own->product_tile_stride);
}

static void finish_block(const convolution *all, const buffers *own, int64_t first, int num_tiles, int channel,
                         int num_channels) {
    const convolution_call *call = all->call;
    for (int tile = 0; tile < num_tiles; tile++) {
        tile_place at = place_of(all, first + tile);
        int64_t offset = pixel_of(call, at.image, at.top, at.left) * call->out_channels + channel;
        int rows = call->height - at.top, columns = call->width - at.left;
        winograd_output output = {
            .pixels = call->output + offset,
            .other = call->other == NULL ? NULL : call->other + offset,
            .row_stride = (ptrdiff_t)call->width * call->out_channels,
            .column_stride = call->out_channels,
            .rows = rows < OUTPUT_SIDE ? rows : OUTPUT_SIDE,
            .columns = columns < OUTPUT_SIDE ? columns : OUTPUT_SIDE,
        };
        all->kernels->transform_output(own->products + tile * own->product_tile_stride, own->product_point_stride,
                                       call->bias + channel, num_channels, call->apply_relu, &output);
    }
}

static void run_task(const convolution *all, const buffers *own, int64_t block, int split, int is_transformed) {
    int64_t first = first_tile(all, block);
    int num_tiles = (int)(first_tile(all, block + 1) - first), width = all->kernels->panel_width;
    int panel = split * all->num_panels / all->num_splits, end = (split + 1) * all->num_panels / all->num_splits;
    if (!is_transformed) transform_block(all, own, first, num_tiles);
    while (panel < end) {
        int last = panel + PANELS_AT_ONCE < end ? panel + PANELS_AT_ONCE : end;
        int channel = panel * width, left = all->call->out_channels - channel;
        int num_channels = left < (last - panel) * width ? left : (last - panel) * width;
        multiply_block(all, own, num_tiles, panel, last);
        finish_block(all, own, first, num_tiles, channel, num_channels);
        panel = last;
    }
}

/* What each thread runs, until no task is left. There may be fewer threads than were asked for, never more. */
static void run_thread(void *data) {
    convolution *all = data;
    buffers own = buffers_of(all, atomic_fetch_add(&all->next_thread, 1));
    int64_t task, block = -1;
    while ((task = atomic_fetch_add(&all->next_task, 1)) < all->num_tasks) {
        int is_transformed = block == task / all->num_splits;
        block = task / all->num_splits;
        run_task(all, &own, block, (int)(task % all->num_splits), is_transformed);
    }
}

static int64_t greatest_divisor(int64_t a, int64_t b) { return b == 0 ? a : greatest_divisor(b, a % b); }

/* As many tasks as there are threads, or a multiple: of smaller blocks; where those would be too small, of the same with
 * divided panels; and for many threads of both. */
static void divide(convolution *all) {
    int64_t num_threads = all->call->num_threads;
    all->num_blocks = (all->num_tiles + MAX_BLOCK - 1) / MAX_BLOCK;
    all->num_splits = 1;
    int64_t rounded = round_up(all->num_blocks, num_threads);
    if (all->num_tiles / rounded >= MIN_BLOCK) {
        all->num_blocks = rounded;
    } else if (num_threads > 1) {
        int64_t wanted = num_threads / greatest_divisor(num_threads, all->num_blocks);
        all->num_splits = (int)(wanted < all->num_panels ? wanted : all->num_panels);
        int64_t needed = (num_threads + all->num_splits - 1) / all->num_splits;
        int64_t most = (all->num_tiles + LEAST_BLOCK - 1) / LEAST_BLOCK;
        if (all->num_blocks < needed) all->num_blocks = needed < most ? needed : most;
    }
    all->num_tasks = all->num_blocks * all->num_splits;
}

EXPORT int reconv_winograd_version(void) { return VERSION; }

/* The fastest instructions of this processor: 0 plain, 1 AVX2 with FMA, 2 AVX-512. */
EXPORT int reconv_winograd_instructions(void) {
#if WINOGRAD_HAS_X86
    if (__builtin_cpu_supports("avx512f")) return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return PLAIN;
}

/* Output channels of a panel of weights; 0 if the library has no such instructions. */
EXPORT int reconv_winograd_panel_width(int instructions) {
    const winograd_kernels *kernels = kernels_of(instructions);
    return kernels == NULL ? 0 : kernels->panel_width;
}

/* Floats of workspace that one thread needs. */
EXPORT int64_t reconv_winograd_workspace(int in_channels, int instructions) {
    buffers own = strides_of(in_channels, kernels_of(instructions)->panel_width);
    return size_of(&own);
}

EXPORT void reconv_winograd_convolution(const convolution_call *call) {
    const winograd_kernels *kernels = kernels_of(call->instructions);
    convolution all = {
        .call = call,
        .kernels = kernels,
        .tiles_down = (call->height + OUTPUT_SIDE - 1) / OUTPUT_SIDE,
        .tiles_across = (call->width + OUTPUT_SIDE - 1) / OUTPUT_SIDE,
        .num_panels = (int)(round_up(call->out_channels, kernels->panel_width) / kernels->panel_width),
    };
    all.num_tiles = call->batch * all.tiles_down * all.tiles_across;
    if (all.num_tiles == 0) return;
    divide(&all);
    if (call->num_threads > 1 && all.num_tasks > 1)
        call->parallel(run_thread, &all, (unsigned)call->num_threads, 0);
    else
        run_thread(&all);
}
