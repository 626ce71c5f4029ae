/* Resizing along rows and columns, and conversion from YCbCr to RGB.
 *
 * Integers throughout, the same for plain C and AVX2; nothing is written outside the rows given.
 */
#include "jpeg.h"

#include <string.h>

#if JPEG_HAS_AVX2
#include <immintrin.h>
#endif

enum { ACROSS_SHIFT = JPEG_WEIGHT_BITS - JPEG_FRACTION_BITS, COLOUR_SHIFT = 14 + JPEG_FRACTION_BITS };
enum { UNIT = 16384, RED_CR = 22970, GREEN_CB = -5638, GREEN_CR = -11700, BLUE_CB = 29032 }; /* in 14 bits */
enum { GREY = 128 << JPEG_FRACTION_BITS };

static int32_t saturate(int32_t value) { return value > 32767 ? 32767 : value < -32768 ? -32768 : value; }

static uint8_t clip(int32_t value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }

static size_t padded(int width) { return ((size_t)width + 15) & ~(size_t)15; }

/* ---- along a row ---- */

static int group_half(jpeg_across *a, int group, int half) {
    const jpeg_axis *axis = &a->axis;
    int n = axis->num_outputs, taps = axis->num_taps, first = group * 8 + half * 4, offset = -1;
    for (int i = first; i < first + 4; i++) {
        int start = axis->starts[i < n ? i : n - 1];
        offset = offset < 0 || start < offset ? start : offset;
    }
    a->groups.offsets[2 * group + half] = offset;
    for (int i = first; i < first + 4; i++) {
        int distance = axis->starts[i < n ? i : n - 1] - offset, lane = i - group * 8;
        uint8_t *shuffle = a->groups.shuffles + 32 * (size_t)group + 4 * lane;
        if (distance > 14) return 0;
        shuffle[0] = (uint8_t)distance;
        shuffle[2] = (uint8_t)(distance + 1);
        shuffle[1] = shuffle[3] = 0x80;
        if (i >= n) continue;
        for (int tap = 0; tap < taps; tap++) {
            size_t pair = (size_t)group * (size_t)(taps / 2) + (size_t)(tap / 2);
            a->groups.weights[pair * 16 + 2 * (size_t)lane + (tap & 1)] = axis->weights[(size_t)i * (size_t)taps + (size_t)tap];
        }
    }
    return 1;
}

int jpeg_group(jpeg_across *a, jpeg_arena *arena) {
    size_t count = padded(a->axis.num_outputs) / 8, num_weights = count * 8 * (size_t)a->axis.num_taps;
    jpeg_groups *g = &a->groups;
    g->num_groups = 0;
    g->offsets = jpeg_take(arena, count * 2 * sizeof *g->offsets);
    g->shuffles = jpeg_take(arena, count * 32);
    g->weights = jpeg_take(arena, num_weights * sizeof *g->weights);
    if (g->offsets == NULL || g->shuffles == NULL || g->weights == NULL) return JPEG_OTHER;
    memset(g->weights, 0, num_weights * sizeof *g->weights);
    for (size_t i = 0; i < 2 * count; i++)
        if (!group_half(a, (int)(i / 2), (int)(i & 1))) return JPEG_DONE;
    g->num_groups = (int)count;
    return JPEG_DONE;
}

JPEG_INLINE void row_plain(const jpeg_axis *axis, const uint8_t *row, int origin, int16_t *out) {
    for (int i = 0; i < axis->num_outputs; i++) {
        const int16_t *weights = axis->weights + (size_t)i * (size_t)axis->num_taps;
        const uint8_t *from = row + (axis->starts[i] - origin);
        int32_t sum = 1 << (ACROSS_SHIFT - 1);
        for (int tap = 0; tap < axis->num_taps; tap++) sum += weights[tap] * from[tap];
        out[i] = (int16_t)saturate(sum >> ACROSS_SHIFT);
    }
    for (size_t i = (size_t)axis->num_outputs; i < padded(axis->num_outputs); i++) out[i] = 0;
}

#if JPEG_HAS_AVX2
JPEG_AVX2 static void row_groups(const jpeg_across *a, const uint8_t *row, int origin, int16_t *out) {
    int num_pairs = a->axis.num_taps / 2;
    const int16_t *weights = a->groups.weights;
    for (int group = 0; group < a->groups.num_groups; group++) {
        const uint8_t *low = row + (a->groups.offsets[2 * group] - origin);
        const uint8_t *high = row + (a->groups.offsets[2 * group + 1] - origin);
        __m256i shuffle = _mm256_load_si256((const __m256i *)(a->groups.shuffles + 32 * (size_t)group));
        __m256i sum = _mm256_set1_epi32(1 << (ACROSS_SHIFT - 1));
        for (int pair = 0; pair < num_pairs; pair++, weights += 16) {
            __m256i both = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(low + 2 * pair))),
                _mm_loadu_si128((const __m128i *)(high + 2 * pair)), 1);
            __m256i samples = _mm256_shuffle_epi8(both, shuffle);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(samples, _mm256_load_si256((const __m256i *)weights)));
        }
        sum = _mm256_srai_epi32(sum, ACROSS_SHIFT);
        __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        _mm_store_si128((__m128i *)(out + 8 * group), packed);
    }
}

/* For outputs far apart, each made of many inputs. */
JPEG_AVX2 static void row_wide(const jpeg_axis *axis, const uint8_t *row, int origin, int16_t *out) {
    row_plain(axis, row, origin, out);
}
#endif

void jpeg_resize_row(const jpeg_across *a, const uint8_t *row, int origin, int16_t *out, int use_avx2) {
#if JPEG_HAS_AVX2
    if (use_avx2 && a->groups.num_groups > 0) {
        row_groups(a, row, origin, out);
        return;
    }
    if (use_avx2) {
        row_wide(&a->axis, row, origin, out);
        return;
    }
#else
    (void)use_avx2;
#endif
    row_plain(&a->axis, row, origin, out);
}

/* ---- along a column ---- */

static void column_plain(const int16_t *weights, int num_taps, const int16_t *rows, size_t stride, int width, int16_t *out) {
    for (int x = 0; x < width; x++) {
        int32_t sum = 1 << (JPEG_WEIGHT_BITS - 1);
        for (int tap = 0; tap < num_taps; tap++) sum += weights[tap] * rows[(size_t)tap * stride + (size_t)x];
        out[x] = (int16_t)saturate(sum >> JPEG_WEIGHT_BITS);
    }
}

#if JPEG_HAS_AVX2
JPEG_AVX2 static void column_avx2(
    const int16_t *weights, int num_taps, const int16_t *rows, size_t stride, int width, int16_t *out) {
    for (int x = 0; x < width; x += 16) {
        __m256i low = _mm256_set1_epi32(1 << (JPEG_WEIGHT_BITS - 1)), high = low;
        const int16_t *at = rows + x;
        for (int tap = 0; tap < num_taps; tap += 2, at += 2 * stride) {
            int32_t both;
            memcpy(&both, weights + tap, sizeof both);
            __m256i weight = _mm256_set1_epi32(both);
            __m256i first = _mm256_load_si256((const __m256i *)at);
            __m256i second = _mm256_load_si256((const __m256i *)(at + stride));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(first, second), weight));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(first, second), weight));
        }
        low = _mm256_srai_epi32(low, JPEG_WEIGHT_BITS);
        high = _mm256_srai_epi32(high, JPEG_WEIGHT_BITS);
        _mm256_store_si256((__m256i *)(out + x), _mm256_packs_epi32(low, high));
    }
}
#endif

void jpeg_resize_column(
    const jpeg_axis *down, int output, const int16_t *rows, size_t stride, int width, int16_t *out, int use_avx2) {
    const int16_t *weights = down->weights + (size_t)output * (size_t)down->num_taps;
    rows += (size_t)(down->starts[output] - down->first) * stride;
#if JPEG_HAS_AVX2
    if (use_avx2) {
        column_avx2(weights, down->num_taps, rows, stride, width, out);
        return;
    }
#else
    (void)use_avx2;
#endif
    column_plain(weights, down->num_taps, rows, stride, width, out);
}

/* ---- colour ---- */

static void colour_plain(
    const int16_t *y, const int16_t *cb, const int16_t *cr, int from, int to, uint8_t *red, uint8_t *green,
    uint8_t *blue) {
    for (int x = from; x < to; x++) {
        int32_t light = y[x] * UNIT + (1 << (COLOUR_SHIFT - 1));
        int32_t b = cb == NULL ? 0 : saturate(cb[x] - GREY), r = cr == NULL ? 0 : saturate(cr[x] - GREY);
        red[x] = clip((light + r * RED_CR) >> COLOUR_SHIFT);
        green[x] = clip((light + b * GREEN_CB + r * GREEN_CR) >> COLOUR_SHIFT);
        blue[x] = clip((light + b * BLUE_CB) >> COLOUR_SHIFT);
    }
}

#if JPEG_HAS_AVX2

#define PAIR(first, second) _mm256_set1_epi32((int)((uint32_t)(uint16_t)(first) | (uint32_t)(second) << 16))

/* first * factors.first + second * factors.second, for 16 of each, rounded, as bytes in the lower half of each lane. */
JPEG_INLINE JPEG_AVX2 __m256i mixed(__m256i first, __m256i second, __m256i factors) {
    const __m256i round = _mm256_set1_epi32(1 << (COLOUR_SHIFT - 1));
    __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(first, second), factors);
    __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(first, second), factors);
    low = _mm256_srai_epi32(_mm256_add_epi32(low, round), COLOUR_SHIFT);
    high = _mm256_srai_epi32(_mm256_add_epi32(high, round), COLOUR_SHIFT);
    return _mm256_packs_epi32(low, high);
}

JPEG_INLINE JPEG_AVX2 void store_16(uint8_t *out, __m256i words) {
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0xD8);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(bytes));
}

JPEG_AVX2 static int colour_avx2(
    const int16_t *y, const int16_t *cb, const int16_t *cr, int width, uint8_t *red, uint8_t *green, uint8_t *blue) {
    const __m256i grey = _mm256_set1_epi16(GREY), round = _mm256_set1_epi32(1 << (COLOUR_SHIFT - 1));
    int x = 0;
    for (; x + 16 <= width; x += 16) {
        __m256i l = _mm256_load_si256((const __m256i *)(y + x));
        __m256i b = cb == NULL ? _mm256_setzero_si256()
                               : _mm256_subs_epi16(_mm256_load_si256((const __m256i *)(cb + x)), grey);
        __m256i r = cr == NULL ? _mm256_setzero_si256()
                               : _mm256_subs_epi16(_mm256_load_si256((const __m256i *)(cr + x)), grey);
        store_16(red + x, mixed(l, r, PAIR(UNIT, RED_CR)));
        store_16(blue + x, mixed(l, b, PAIR(UNIT, BLUE_CB)));
        __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(l, b), PAIR(UNIT, GREEN_CB));
        __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(l, b), PAIR(UNIT, GREEN_CB));
        __m256i zero = _mm256_setzero_si256();
        low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(r, zero), PAIR(GREEN_CR, 0)));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(r, zero), PAIR(GREEN_CR, 0)));
        low = _mm256_srai_epi32(_mm256_add_epi32(low, round), COLOUR_SHIFT);
        high = _mm256_srai_epi32(_mm256_add_epi32(high, round), COLOUR_SHIFT);
        store_16(green + x, _mm256_packs_epi32(low, high));
    }
    return x;
}

#endif

void jpeg_colour(
    const int16_t *y, const int16_t *cb, const int16_t *cr, int width, uint8_t *red, uint8_t *green, uint8_t *blue,
    int use_avx2) {
    int from = 0;
#if JPEG_HAS_AVX2
    if (use_avx2) from = colour_avx2(y, cb, cr, width, red, green, blue);
#else
    (void)use_avx2;
#endif
    colour_plain(y, cb, cr, from, width, red, green, blue);
}
