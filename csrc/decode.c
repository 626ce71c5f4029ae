/* A resized crop of a JPEG file: the library's functions for one file, and the memory they work in.
 *
 * A call that does not return JPEG_DONE may have written to `out`, but to nothing else. Calls are thread-safe.
 */
#include "jpeg.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_OUTPUT = 8192, NUM_LOOKUPS = 8, MAX_PIECES = 64 };
enum { KEPT_BYTES = 16 << 20 }; /* a thread keeps no more than this between calls */

/* ---- memory ---- */

struct jpeg_arena {
    uint8_t *kept;
    size_t kept_bytes, used_bytes, wanted_bytes;
    void *pieces[MAX_PIECES]; /* allocations that did not fit into `kept` */
    int num_pieces;
    jpeg_lookup lookups[NUM_LOOKUPS];
    int is_dc[NUM_LOOKUPS], is_used[NUM_LOOKUPS]; /* used: by the call that runs */
    int num_lookups, next_lookup;
};

static pthread_key_t arena_key;
static pthread_once_t arena_once = PTHREAD_ONCE_INIT;
static int has_arena_key;

void *jpeg_take(jpeg_arena *arena, size_t size_bytes) {
    size_bytes = (size_bytes + 63) & ~(size_t)63;
    arena->wanted_bytes += size_bytes;
    if (arena->kept_bytes - arena->used_bytes >= size_bytes && size_bytes > 0) {
        void *memory = arena->kept + arena->used_bytes;
        arena->used_bytes += size_bytes;
        return memory;
    }
    if (arena->num_pieces == MAX_PIECES) return NULL;
    void *piece = aligned_alloc(64, size_bytes ? size_bytes : 64);
    if (piece != NULL) arena->pieces[arena->num_pieces++] = piece;
    return piece;
}

static void start_call(jpeg_arena *arena) {
    arena->used_bytes = arena->wanted_bytes = 0;
    memset(arena->is_used, 0, sizeof arena->is_used);
}

static void end_call(jpeg_arena *arena) {
    for (int i = 0; i < arena->num_pieces; i++) free(arena->pieces[i]);
    arena->num_pieces = 0;
#ifndef JPEG_FUZZ /* there, every piece is apart, so that the address sanitizer sees its ends */
    if (arena->wanted_bytes > arena->kept_bytes && arena->wanted_bytes <= KEPT_BYTES) {
        free(arena->kept);
        arena->kept_bytes = arena->wanted_bytes + arena->wanted_bytes / 4;
        arena->kept_bytes &= ~(size_t)63;
        arena->kept = aligned_alloc(64, arena->kept_bytes);
        if (arena->kept == NULL) arena->kept_bytes = 0;
    }
#endif
}

static void free_arena(void *pointer) {
    jpeg_arena *arena = pointer;
    free(arena->kept);
    free(arena);
}

static void make_arena_key(void) { has_arena_key = pthread_key_create(&arena_key, free_arena) == 0; }

static jpeg_arena *thread_arena(void) {
    pthread_once(&arena_once, make_arena_key);
    if (!has_arena_key) return NULL;
    jpeg_arena *arena = pthread_getspecific(arena_key);
    if (arena == NULL) {
        arena = calloc(1, sizeof *arena);
        if (arena != NULL && pthread_setspecific(arena_key, arena) != 0) {
            free(arena);
            arena = NULL;
        }
    }
    return arena;
}

/* The lookup of these codes, kept from an earlier call where it is the same: most files share their tables. */
static jpeg_lookup *find_lookup(jpeg_arena *arena, const jpeg_codes *codes, int is_dc) {
    for (int i = 0; i < arena->num_lookups; i++) {
        jpeg_lookup *t = &arena->lookups[i];
        if (arena->is_dc[i] == is_dc && t->num_symbols == codes->num_symbols &&
            memcmp(t->counts, codes->counts, sizeof t->counts) == 0 &&
            memcmp(t->symbols, codes->symbols, (size_t)codes->num_symbols) == 0) {
            arena->is_used[i] = 1;
            return t;
        }
    }
    int place = arena->next_lookup;
    while (arena->is_used[place]) place = (place + 1) % NUM_LOOKUPS; /* a call uses six at most */
    if (jpeg_build_lookup(codes, is_dc, &arena->lookups[place]) != JPEG_DONE) {
        arena->lookups[place].num_symbols = 0; /* equal to no table */
        return NULL;
    }
    arena->is_dc[place] = is_dc;
    arena->is_used[place] = 1;
    arena->next_lookup = (place + 1) % NUM_LOOKUPS;
    if (arena->num_lookups <= place) arena->num_lookups = place + 1;
    return &arena->lookups[place];
}

/* ---- one call ---- */

typedef struct {
    jpeg_across *across;
    jpeg_axis *down;
    int16_t *rows; /* from down->first on, resized along the row */
    size_t stride;
    int origin;      /* the first sample of the strip */
    int strip_height; /* in samples */
} plane_state;

typedef struct {
    jpeg_header header;
    jpeg_frame frame;
    jpeg_across across[2]; /* of the full-size planes and of those that are smaller */
    jpeg_axis down[2];
    plane_state planes[3];
    int use_avx2;
} call;

static void row_done(void *user, int mcu_row) {
    call *c = user;
    for (int i = 0; i < c->frame.num_planes; i++) {
        const jpeg_plane *plane = &c->frame.planes[i];
        const plane_state *state = &c->planes[i];
        int top = mcu_row * state->strip_height;
        for (int y = 0; y < state->strip_height; y++) {
            if (top + y < state->down->first || top + y >= state->down->last) continue;
            int16_t *out = state->rows + (size_t)(top + y - state->down->first) * state->stride;
            jpeg_resize_row(state->across, plane->strip + y * plane->stride, state->origin, out, c->use_avx2);
        }
    }
}

static int divided_up(int value, int by) { return (value + by - 1) / by; }

/* The MCUs that hold all samples needed, from the axes of the planes. */
static void find_mcus(call *c) {
    jpeg_frame *f = &c->frame;
    const jpeg_header *h = &c->header;
    f->mcus_across = divided_up(h->width, 8 * h->max_across);
    f->mcus_down = divided_up(h->height, 8 * h->max_down);
    f->left = f->mcus_across;
    f->top = f->mcus_down;
    f->right = f->bottom = 0;
    for (int i = 0; i < f->num_planes; i++) {
        const jpeg_axis *across = &c->planes[i].across->axis, *down = c->planes[i].down;
        int wide = 8 * h->components[i].across, high = 8 * h->components[i].down;
        f->left = across->first / wide < f->left ? across->first / wide : f->left;
        f->top = down->first / high < f->top ? down->first / high : f->top;
        f->right = divided_up(across->last, wide) > f->right ? divided_up(across->last, wide) : f->right;
        f->bottom = divided_up(down->last, high) > f->bottom ? divided_up(down->last, high) : f->bottom;
    }
    f->restart_interval = h->restart_interval ? h->restart_interval : f->mcus_across * f->mcus_down;
}

static int prepare_axes(call *c, const jpeg_request *across, const jpeg_request *down, jpeg_arena *arena) {
    int num_kinds = c->header.num_components == 1 ? 1 : 2;
    for (int kind = 0; kind < num_kinds; kind++) {
        int is_narrow = kind == 1 && c->header.max_across == 2, is_low = kind == 1 && c->header.max_down == 2;
        if (kind == 1 && !is_narrow) c->across[1] = c->across[0];
        else if (jpeg_make_axis(across, is_narrow, arena, &c->across[kind].axis) ||
                 jpeg_group(&c->across[kind], arena))
            return JPEG_OTHER;
        if (kind == 1 && !is_low) c->down[1] = c->down[0];
        else if (jpeg_make_axis(down, is_low, arena, &c->down[kind])) return JPEG_OTHER;
    }
    for (int i = 0; i < c->header.num_components; i++) {
        c->planes[i].across = &c->across[i > 0];
        c->planes[i].down = &c->down[i > 0];
    }
    return JPEG_DONE;
}

static int prepare_planes(call *c, jpeg_arena *arena) {
    const jpeg_header *h = &c->header;
    for (int i = 0; i < c->frame.num_planes; i++) {
        const jpeg_component *component = &h->components[i];
        jpeg_plane *plane = &c->frame.planes[i];
        plane_state *state = &c->planes[i];
        int taps = state->down->num_taps, num_rows = state->down->last - state->down->first;
        size_t width = (size_t)(c->frame.right - c->frame.left) * 8 * (size_t)component->across;
        plane->across = component->across;
        plane->down = component->down;
        plane->dc = find_lookup(arena, &h->dc[component->dc_codes], 1);
        jpeg_lookup *ac = find_lookup(arena, &h->ac[component->ac_codes], 0);
        if (plane->dc == NULL || ac == NULL) return JPEG_OTHER;
        if (!ac->has_skips) jpeg_build_skips(ac);
        plane->ac = ac;
        for (int k = 0; k < 64; k++)
            plane->quantiser[jpeg_block_order[k]] = (int16_t)h->quantisers[component->quantiser][k];
        /* Groups of outputs read 16 bytes at a time, and up to all taps after the last sample. */
        plane->stride = (ptrdiff_t)(width + (size_t)state->across->axis.num_taps + 63) & ~(ptrdiff_t)63;
        state->strip_height = 8 * component->down;
        state->origin = c->frame.left * 8 * component->across;
        state->stride = ((size_t)state->across->axis.num_outputs + 15) & ~(size_t)15;
        size_t strip_bytes = (size_t)plane->stride * (size_t)state->strip_height + 64;
        plane->strip = jpeg_take(arena, strip_bytes);
        state->rows = jpeg_take(arena, (size_t)(num_rows + taps) * state->stride * sizeof *state->rows);
        if (plane->strip == NULL || state->rows == NULL) return JPEG_OTHER;
        memset(plane->strip, 0, strip_bytes); /* what is read after the last sample weighs nothing, but is read */
        memset(state->rows + (size_t)num_rows * state->stride, 0, (size_t)taps * state->stride * sizeof *state->rows);
    }
    return JPEG_DONE;
}

typedef struct {
    uint8_t *data;
    int height, width;
    int is_interleaved; /* [height, width, 3], else [3, height, width] */
} output_image;

static int write_image(const call *c, const output_image *out, jpeg_arena *arena) {
    size_t width = (size_t)out->width, stride = c->planes[0].stride;
    int16_t *lines = jpeg_take(arena, 3 * stride * sizeof *lines);
    uint8_t *apart = jpeg_take(arena, 3 * width);
    if (lines == NULL || apart == NULL) return JPEG_OTHER;
    for (int y = 0; y < out->height; y++) {
        for (int i = 0; i < c->frame.num_planes; i++) {
            const plane_state *p = &c->planes[i];
            jpeg_resize_column(p->down, y, p->rows, stride, out->width, lines + (size_t)i * stride, c->use_avx2);
        }
        int is_grey = c->frame.num_planes == 1;
        size_t plane_bytes = out->is_interleaved ? width : width * (size_t)out->height;
        uint8_t *red = out->is_interleaved ? apart : out->data + (size_t)y * width;
        uint8_t *green = red + plane_bytes, *blue = green + plane_bytes;
        jpeg_colour(
            lines, is_grey ? NULL : lines + stride, is_grey ? NULL : lines + 2 * stride, out->width, red, green, blue,
            c->use_avx2);
        if (!out->is_interleaved) continue;
        uint8_t *to = out->data + 3 * width * (size_t)y;
        for (size_t x = 0; x < width; x++, to += 3) to[0] = red[x], to[1] = green[x], to[2] = blue[x];
    }
    return JPEG_DONE;
}

static int run(
    call *c, const uint8_t *data, size_t size, const jpeg_request *across, const jpeg_request *down,
    const output_image *out, jpeg_arena *arena) {
    jpeg_scan scan;
    c->frame.num_planes = c->header.num_components;
    if (prepare_axes(c, across, down, arena)) return JPEG_OTHER;
    find_mcus(c);
    if (prepare_planes(c, arena)) return JPEG_OTHER;
    size_t total = (size_t)c->frame.mcus_across * (size_t)c->frame.mcus_down;
    size_t interval = (size_t)c->frame.restart_interval, start = c->header.scan_start;
    if (jpeg_unstuff(data + start, size - start, (total + interval - 1) / interval, arena, &scan)) return JPEG_OTHER;
    if (jpeg_decode_scan(&c->frame, &scan, c->use_avx2, row_done, c)) return JPEG_OTHER;
    return write_image(c, out, arena);
}

static int is_avx2_here(void) {
#if JPEG_HAS_AVX2
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
#else
    return 0;
#endif
}

/* ---- public functions ---- */

/* Width and height in `size_out`, if the file is of the kind that is decoded here. */
EXPORT int reconv_jpeg_size(const uint8_t *data, size_t size, int32_t size_out[2]) {
    jpeg_header header;
    if (jpeg_read_header(data, size, &header) != JPEG_DONE) return JPEG_OTHER;
    size_out[0] = header.width;
    size_out[1] = header.height;
    return JPEG_DONE;
}

/* Version of the functions below and of the pixels they make. */
EXPORT int reconv_jpeg_version(void) { return 5; }

/* Whether vector instructions are used where they are allowed. */
EXPORT int reconv_jpeg_has_avx2(void) { return is_avx2_here(); }

/* The box (left, top, right, bottom) resized to height x width. `is_cut` keeps every read inside the box, as if it
 * had been cut out first. */
EXPORT int reconv_jpeg_crop(
    const uint8_t *data, size_t size, double left, double top, double right, double bottom, int is_cut, uint8_t *out,
    int height, int width, int is_interleaved, int is_antialiased, int filter, int may_use_avx2) {
    call c;
    if (height < 1 || width < 1 || height > MAX_OUTPUT || width > MAX_OUTPUT) return JPEG_OTHER;
    if (filter != JPEG_BILINEAR && filter != JPEG_BICUBIC) return JPEG_OTHER;
    if (jpeg_read_header(data, size, &c.header) != JPEG_DONE) return JPEG_OTHER;
    int full_width = c.header.width, full_height = c.header.height;
    if (!(left >= 0 && left < right && right <= full_width)) return JPEG_OTHER;
    if (!(top >= 0 && top < bottom && bottom <= full_height)) return JPEG_OTHER;
    int is_smooth = c.header.max_across == 1 || full_width > 4; /* as the usual decoder: not in the narrowest planes */
    jpeg_request across = {
        .low = left, .high = right, .length = full_width, .num_outputs = width,
        .floor = is_cut ? (int)left : 0, .ceiling = is_cut ? (int)ceil(right) : full_width,
        .is_antialiased = is_antialiased, .filter = filter, .is_smooth = is_smooth};
    jpeg_request down = {
        .low = top, .high = bottom, .length = full_height, .num_outputs = height,
        .floor = is_cut ? (int)top : 0, .ceiling = is_cut ? (int)ceil(bottom) : full_height,
        .is_antialiased = is_antialiased, .filter = filter, .is_smooth = is_smooth};
    jpeg_arena *arena = thread_arena();
    if (arena == NULL) return JPEG_OTHER;
    c.use_avx2 = may_use_avx2 && is_avx2_here();
    start_call(arena);
    output_image to = {out, height, width, is_interleaved};
    int result = run(&c, data, size, &across, &down, &to, arena);
    end_call(arena);
    return result;
}
