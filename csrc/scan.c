/* Decodes the entropy-coded scan: bytes, Huffman codes, blocks; blocks that are not needed are skipped.
 *
 * A scan is decoded only while every code is one that a baseline encoder writes, and all reads stay inside the unstuffed
 * copy and its padding.
 */
#include "jpeg.h"

#include <string.h>

enum { LOOKUP = JPEG_LOOKUP_BITS, SKIP = JPEG_SKIP_BITS, MAX_DC_BITS = 11, MAX_AC_BITS = 10 };

/* A step: how many bits (0 to 5), how far in the block (8 to 15), the value (16 to 31). Two distances are none, and
 * lead out of any block, so that one comparison finds both: the end of the block, and a code that the lookup does not
 * hold whole. The latter takes no bits, and in place of the value it holds what is known: how many bits follow the code
 * (16 to 19), the code's own length (20 to 23; 0: unknown), and the true distance (24 to 31). */
enum { END_OF_BLOCK = 128, LONG = 64 };

#define BITS(step) ((step) & 63)
#define DISTANCE(step) ((step) >> 8 & 255)
#define IS_LONG(step) ((step) & (LONG << 8))

/* ---- tables ---- */

static int is_usual(int symbol, int is_dc) {
    if (is_dc) return symbol <= MAX_DC_BITS;
    int size = symbol & 15;
    return size <= MAX_AC_BITS && (size > 0 || symbol == 0 || symbol == 0xF0);
}

static int distance_of(int symbol, int is_dc) {
    if (is_dc) return 0;
    return symbol == 0 ? END_OF_BLOCK : (symbol >> 4) + 1;
}

static int extended(unsigned bits, int size) {
    return size > 0 && bits < 1u << (size - 1) ? (int)bits - (1 << size) + 1 : (int)bits;
}

static void fill_steps(jpeg_lookup *t, int code, int length, int symbol, int is_dc) {
    int size = symbol & 15, free_bits = LOOKUP - length;
    uint32_t *at = t->steps + ((size_t)code << free_bits);
    uint32_t distance = (uint32_t)distance_of(symbol, is_dc);
    if (size > free_bits) {
        uint32_t known = (uint32_t)size | (uint32_t)length << 4 | distance << 8;
        for (int i = 0; i < 1 << free_bits; i++) at[i] = LONG << 8 | known << 16;
        return;
    }
    int repeats = 1 << (free_bits - size);
    for (unsigned bits = 0; bits < 1u << size; bits++) {
        uint32_t step = (uint32_t)(length + size) | distance << 8 | (uint32_t)extended(bits, size) << 16;
        for (int i = 0; i < repeats; i++) *at++ = step;
    }
}

int jpeg_build_lookup(const jpeg_codes *codes, int is_dc, jpeg_lookup *t) {
    int code = 0, index = 0;
    memcpy(t->counts, codes->counts, sizeof t->counts);
    memcpy(t->symbols, codes->symbols, sizeof t->symbols);
    t->num_symbols = codes->num_symbols;
    t->has_skips = 0;
    for (int i = 0; i < 1 << LOOKUP; i++) t->steps[i] = LONG << 8;
    for (int length = 1; length <= 16; length++) {
        t->offset[length] = index - code;
        for (int i = 0; i < codes->counts[length]; i++, index++, code++) {
            int symbol = codes->symbols[index];
            if (code >= (1 << length) - 1) return JPEG_OTHER; /* more codes than fit, or one of all ones */
            if (is_dc && symbol > 15) return JPEG_OTHER;
            if (length <= LOOKUP && is_usual(symbol, is_dc)) fill_steps(t, code, length, symbol, is_dc);
        }
        t->last_code[length] = code << (16 - length);
        code <<= 1;
    }
    return JPEG_DONE;
}

/* For blocks that are not needed: as many whole steps at once as a lookup shows. */
void jpeg_build_skips(jpeg_lookup *t) {
    for (uint32_t i = 0; i < 1u << SKIP; i++) {
        unsigned used = 0, distance = 0;
        while (distance < END_OF_BLOCK) {
            uint32_t step = t->steps[(i << used & ((1u << SKIP) - 1)) >> (SKIP - LOOKUP)];
            unsigned next = DISTANCE(step);
            if (IS_LONG(step) || used + BITS(step) > SKIP || (distance + next > 63 && next != END_OF_BLOCK)) break;
            used += BITS(step);
            distance += next;
        }
        t->skips[i] = (uint16_t)(used ? used | distance << 8 : LONG << 8);
    }
    t->has_skips = 1;
}

/* ---- bytes ---- */

int jpeg_unstuff(const uint8_t *data, size_t size, size_t num_segments, jpeg_arena *arena, jpeg_scan *scan) {
    const uint8_t *at = data, *end = data + size;
    if (num_segments - 1 > size / 2) return JPEG_OTHER; /* fewer bytes than restart markers */
    uint8_t *bytes = jpeg_take(arena, size + JPEG_SCAN_PADDING), *out = bytes;
    size_t *ends = jpeg_take(arena, num_segments * sizeof *ends), found = 0;
    if (bytes == NULL || ends == NULL) return JPEG_OTHER;
    for (;;) {
        const uint8_t *mark = memchr(at, 0xFF, (size_t)(end - at));
        if (mark == NULL || end - mark < 2) return JPEG_OTHER; /* no end marker: cut off */
        size_t length = (size_t)(mark - at) + (mark[1] == 0);
        memcpy(out, at, length);
        out += length;
        at = mark + 2;
        if (mark[1] == 0) continue;
        ends[found++] = (size_t)(out - bytes);
        if (mark[1] == 0xD9) break;
        if (found == num_segments || mark[1] != 0xD0 + ((found - 1) & 7)) return JPEG_OTHER;
    }
    if (found != num_segments) return JPEG_OTHER;
    memset(out, 0, JPEG_SCAN_PADDING);
    *scan = (jpeg_scan){bytes, num_segments, ends};
    return JPEG_DONE;
}

typedef struct {
    uint64_t bits; /* the next ones, from the top */
    unsigned count;
    const uint8_t *next;
} reader;

JPEG_INLINE uint64_t big_endian(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

/* At least 56 bits; what lies beyond `count` is already right and may be written again. */
JPEG_INLINE void refill(reader *r) {
    r->bits |= big_endian(r->next) >> r->count;
    r->next += (63 - r->count) >> 3;
    r->count |= 56;
}

JPEG_INLINE void drop(reader *r, unsigned num_bits) {
    r->bits <<= num_bits & 63;
    r->count -= num_bits;
}

/* ---- blocks ---- */

typedef struct {
    reader r;
    uint32_t step; /* 0 for a code that is none or unusual */
} long_code;

/* One code that the lookup does not hold whole. The reader goes by value: a pointer would keep it out of registers. */
static __attribute__((noinline)) long_code read_long(reader from, const jpeg_lookup *t, uint32_t step, int is_dc) {
    long_code done = {from, 0};
    reader *r = &done.r;
    unsigned size = step >> 16 & 15, length = step >> 20 & 15, distance = step >> 24;
    refill(r);
    if (length == 0) {
        int top = (int)(r->bits >> 48);
        for (length = 1; length <= 16 && top >= t->last_code[length];) length++;
        if (length > 16) return done;
        int symbol = t->symbols[t->offset[length] + (top >> (16 - length))];
        if (!is_usual(symbol, is_dc)) return done;
        size = symbol & 15;
        distance = (unsigned)distance_of(symbol, is_dc);
    }
    drop(r, length);
    int value = size ? extended((unsigned)(r->bits >> (64 - size)), (int)size) : 0;
    drop(r, size);
    done.step = 1 | distance << 8 | (uint32_t)value << 16;
    return done;
}

#define NO_DC (1 << 16)

/* The difference of a block's mean from the last one's, or NO_DC. */
JPEG_INLINE int read_dc(reader *r, const jpeg_lookup *t) {
    refill(r);
    uint32_t step = t->steps[r->bits >> (64 - LOOKUP)];
    if (JPEG_UNLIKELY(IS_LONG(step))) {
        long_code found = read_long(*r, t, step, 1);
        *r = found.r;
        step = found.step;
        if (step == 0) return NO_DC;
    } else {
        drop(r, BITS(step));
    }
    return (int32_t)step >> 16;
}

/* Coefficients 1 to 63 in their places; returns the last one's index, or -1. */
JPEG_INLINE int read_ac(reader *r, const jpeg_lookup *t, const uint8_t *place, int16_t *block) {
    unsigned k = 0;
    uint32_t step;
#define STEP                                     \
    step = t->steps[r->bits >> (64 - LOOKUP)];   \
    drop(r, BITS(step));                         \
    k += DISTANCE(step);                         \
    block[place[k]] = (int16_t)(step >> 16);     \
    if (JPEG_UNLIKELY(k >= 63)) goto out;
    for (;;) {
        refill(r);
        STEP STEP STEP STEP
        continue;
    out:
        if (JPEG_LIKELY(k >= END_OF_BLOCK)) return (int)k - END_OF_BLOCK;
        if (k == 63) return 63;
        if (!IS_LONG(step)) return -1;
        long_code found = read_long(*r, t, step, 0);
        *r = found.r;
        if (found.step == 0) return -1;
        k += DISTANCE(found.step) - LONG;
        block[place[k]] = (int16_t)(found.step >> 16);
        if (k >= 63) {
            step = found.step;
            goto out;
        }
    }
#undef STEP
}

/* The same without keeping anything; 0, or -1. */
JPEG_INLINE int skip_ac(reader *r, const jpeg_lookup *t) {
    unsigned k = 0, next;
    uint32_t step;
#define STEP                                      \
    step = t->skips[r->bits >> (64 - SKIP)];      \
    next = k + (step >> 8);                       \
    if (JPEG_UNLIKELY(next >= 63)) goto out;      \
    drop(r, BITS(step));                          \
    k = next;
    for (;;) {
        refill(r);
        STEP STEP STEP STEP
        continue;
    out:
        /* Several steps may reach into the next block, whose first bits look like more of this one. */
        if (next == 63 || (next >= END_OF_BLOCK && next < END_OF_BLOCK + 63)) {
            drop(r, BITS(step));
            return 0;
        }
        step = t->steps[r->bits >> (64 - LOOKUP)];
        if (IS_LONG(step)) {
            long_code found = read_long(*r, t, step, 0);
            *r = found.r;
            step = found.step;
            if (step == 0) return -1;
        } else {
            drop(r, BITS(step));
        }
        k += DISTANCE(step);
        if (k >= 63) return k == 63 || k >= END_OF_BLOCK ? 0 : -1;
    }
#undef STEP
}

/* ---- rows of MCUs ---- */

enum { NOWHERE = 64, BLOCK = 80 }; /* a block has one more place, for steps that lead out of it */

typedef struct {
    reader r;
    uint32_t means[3]; /* unsigned: sums may exceed 31 bits in files of strangers; the low 16 bits count */
    size_t segment;
    int first, end;      /* MCUs of the segment */
    const uint8_t *stop; /* after the segment's last byte */
} cursor;

static void start_segment(cursor *c, const jpeg_frame *f, const jpeg_scan *scan, size_t segment) {
    int total = f->mcus_across * f->mcus_down;
    *c = (cursor){.segment = segment, .stop = scan->bytes + scan->ends[segment]};
    c->r.next = scan->bytes + (segment ? scan->ends[segment - 1] : 0);
    c->first = (int)segment * f->restart_interval;
    c->end = total - c->first < f->restart_interval ? total : c->first + f->restart_interval;
}

static int is_past(const cursor *c) { return (c->r.next - c->stop) * 8 > (ptrdiff_t)c->r.count; }

JPEG_INLINE int skip_mcu(cursor *c, const jpeg_frame *f) {
    for (int i = 0; i < f->num_planes; i++) {
        const jpeg_plane *plane = &f->planes[i];
        for (int block = plane->across * plane->down; block > 0; block--) {
            int difference = read_dc(&c->r, plane->dc);
            if (difference == NO_DC || skip_ac(&c->r, plane->ac) < 0) return 0;
            c->means[i] += (uint32_t)difference;
        }
    }
    return !is_past(c);
}

static void fill_block(int mean, uint8_t *out, ptrdiff_t stride) {
    int value = mean * 4 > 32767 ? 32767 : mean * 4 < -32768 ? -32768 : mean * 4; /* as jpeg_idct rounds between */
    value = (value + (128 << 5) + 16) >> 5;
    value = value < 0 ? 0 : value > 255 ? 255 : value;
    for (int y = 0; y < 8; y++) memset(out + y * stride, value, 8);
}

JPEG_INLINE int read_mcu(cursor *c, const jpeg_frame *f, int column, const uint8_t *place, int16_t *block, jpeg_idct *idct) {
    for (int i = 0; i < f->num_planes; i++) {
        const jpeg_plane *plane = &f->planes[i];
        for (int down = 0; down < plane->down; down++) {
            for (int across = 0; across < plane->across; across++) {
                int difference = read_dc(&c->r, plane->dc);
                int last = difference == NO_DC ? -1 : read_ac(&c->r, plane->ac, place, block);
                if (last < 0) return 0;
                int16_t mean = (int16_t)(c->means[i] += (uint32_t)difference);
                uint8_t *out = plane->strip + 8 * down * plane->stride + (column * plane->across + across) * 8;
                if (last == 0) {
                    fill_block((int16_t)(mean * plane->quantiser[0]), out, plane->stride);
                    continue;
                }
                block[0] = mean;
                idct(block, plane->quantiser, out, plane->stride);
                memset(block, 0, 64 * sizeof *block);
            }
        }
    }
    return !is_past(c);
}

JPEG_INLINE int decode_rows(
    const jpeg_frame *f, const jpeg_scan *scan, jpeg_idct *idct, jpeg_row_done *done, void *user) {
    _Alignas(64) int16_t block[BLOCK] = {0};
    uint8_t place[256];
    cursor c;
    int mcu = 0;
    memset(place, NOWHERE, sizeof place);
    memcpy(place, jpeg_block_order, 64);
    start_segment(&c, f, scan, 0);
    for (int row = f->top; row < f->bottom; row++) {
        int first = row * f->mcus_across + f->left;
        if (first >= c.end) {
            start_segment(&c, f, scan, (size_t)(first / f->restart_interval));
            mcu = c.first;
        }
        for (; mcu < first; mcu++)
            if (!skip_mcu(&c, f)) return JPEG_OTHER;
        for (int column = 0; column < f->right - f->left; column++, mcu++) {
            if (mcu == c.end) start_segment(&c, f, scan, c.segment + 1);
            if (!read_mcu(&c, f, column, place, block, idct)) return JPEG_OTHER;
        }
        done(user, row);
    }
    return JPEG_DONE;
}

static int decode_rows_plain(const jpeg_frame *f, const jpeg_scan *scan, jpeg_row_done *done, void *user) {
    return decode_rows(f, scan, jpeg_idct_plain, done, user);
}

#if JPEG_HAS_AVX2
JPEG_AVX2 static int decode_rows_avx2(const jpeg_frame *f, const jpeg_scan *scan, jpeg_row_done *done, void *user) {
    return decode_rows(f, scan, jpeg_idct_avx2, done, user);
}
#endif

int jpeg_decode_scan(const jpeg_frame *frame, const jpeg_scan *scan, int use_avx2, jpeg_row_done *done, void *user) {
#if JPEG_HAS_AVX2
    if (use_avx2) return decode_rows_avx2(frame, scan, done, user);
#else
    (void)use_avx2;
#endif
    return decode_rows_plain(frame, scan, done, user);
}
