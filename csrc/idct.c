/* The inverse cosine transform of one block, in the accurate integer form (13-bit constants, rows first, then columns).
 *
 * Both versions give the same bits for every int16 input: sums wrap at 32 bits, what is stored between saturates at 16.
 *
 * A block keeps the coefficient of vertical frequency u and horizontal frequency v at the place that the first pass
 * multiplies from without shuffling: v and v + 4 lie side by side, for u = 0 to 7, in the order v = 0, 2, 1, 3.
 */
#include "jpeg.h"

#if JPEG_HAS_AVX2
#include <immintrin.h>
#endif

#define PLACE(u, v) ((((v) & 1) * 2 + (((v) >> 1) & 1)) * 16 + 2 * (u) + ((v) >> 2))

const uint8_t jpeg_block_order[64] = {
    PLACE(0, 0), PLACE(0, 1), PLACE(1, 0), PLACE(2, 0), PLACE(1, 1), PLACE(0, 2), PLACE(0, 3), PLACE(1, 2),
    PLACE(2, 1), PLACE(3, 0), PLACE(4, 0), PLACE(3, 1), PLACE(2, 2), PLACE(1, 3), PLACE(0, 4), PLACE(0, 5),
    PLACE(1, 4), PLACE(2, 3), PLACE(3, 2), PLACE(4, 1), PLACE(5, 0), PLACE(6, 0), PLACE(5, 1), PLACE(4, 2),
    PLACE(3, 3), PLACE(2, 4), PLACE(1, 5), PLACE(0, 6), PLACE(0, 7), PLACE(1, 6), PLACE(2, 5), PLACE(3, 4),
    PLACE(4, 3), PLACE(5, 2), PLACE(6, 1), PLACE(7, 0), PLACE(7, 1), PLACE(6, 2), PLACE(5, 3), PLACE(4, 4),
    PLACE(3, 5), PLACE(2, 6), PLACE(1, 7), PLACE(2, 7), PLACE(3, 6), PLACE(4, 5), PLACE(5, 4), PLACE(6, 3),
    PLACE(7, 2), PLACE(7, 3), PLACE(6, 4), PLACE(5, 5), PLACE(4, 6), PLACE(3, 7), PLACE(4, 7), PLACE(5, 6),
    PLACE(6, 5), PLACE(7, 4), PLACE(7, 5), PLACE(6, 6), PLACE(5, 7), PLACE(6, 7), PLACE(7, 6), PLACE(7, 7),
};

enum { FIRST_SHIFT = 11, SECOND_SHIFT = 18 };
#define FIRST_ROUND (1 << (FIRST_SHIFT - 1))
#define SECOND_ROUND ((1 << (SECOND_SHIFT - 1)) + (128 << SECOND_SHIFT)) /* with the level shift */

/* cos(k pi / 16) sqrt(2) in 13 bits, already added up: the factor of each input in each partial sum. */
#define UNIT 8192
#define EVEN_2_2 4433
#define EVEN_2_6 (4433 - 15137)
#define EVEN_3_2 (4433 + 6270)
#define EVEN_3_6 4433
#define ODD_0_1 (9633 - 7373)
#define ODD_0_5 9633
#define ODD_0_3 (9633 - 16069)
#define ODD_0_7 (9633 + 2446 - 7373 - 16069)
#define ODD_1_1 (9633 - 3196)
#define ODD_1_5 (9633 + 16819 - 20995 - 3196)
#define ODD_1_3 (9633 - 20995)
#define ODD_1_7 9633
#define ODD_2_1 9633
#define ODD_2_5 (9633 - 20995)
#define ODD_2_3 (9633 + 25172 - 20995 - 16069)
#define ODD_2_7 (9633 - 16069)
#define ODD_3_1 (9633 + 12299 - 7373 - 3196)
#define ODD_3_5 (9633 - 3196)
#define ODD_3_3 9633
#define ODD_3_7 (9633 - 7373)

static int32_t saturate(int32_t value) { return value > 32767 ? 32767 : value < -32768 ? -32768 : value; }

static uint32_t times(int32_t value, int32_t factor) { return (uint32_t)value * (uint32_t)factor; }

/* Eight values of one row or column; sums are unsigned because damaged data may overflow. */
static void transform(const int32_t in[8], int32_t out[8], uint32_t round, int shift) {
    uint32_t low = times(in[0], UNIT) + times(in[4], UNIT) + round;
    uint32_t high = times(in[0], UNIT) + times(in[4], -UNIT) + round;
    uint32_t even2 = times(in[2], EVEN_2_2) + times(in[6], EVEN_2_6);
    uint32_t even3 = times(in[2], EVEN_3_2) + times(in[6], EVEN_3_6);
    uint32_t even[4] = {low + even3, high + even2, high - even2, low - even3};
    uint32_t odd[4] = {
        times(in[1], ODD_3_1) + times(in[5], ODD_3_5) + times(in[3], ODD_3_3) + times(in[7], ODD_3_7),
        times(in[1], ODD_2_1) + times(in[5], ODD_2_5) + times(in[3], ODD_2_3) + times(in[7], ODD_2_7),
        times(in[1], ODD_1_1) + times(in[5], ODD_1_5) + times(in[3], ODD_1_3) + times(in[7], ODD_1_7),
        times(in[1], ODD_0_1) + times(in[5], ODD_0_5) + times(in[3], ODD_0_3) + times(in[7], ODD_0_7),
    };
    for (int i = 0; i < 4; i++) {
        out[i] = saturate((int32_t)(even[i] + odd[i]) >> shift);
        out[7 - i] = saturate((int32_t)(even[i] - odd[i]) >> shift);
    }
}

void jpeg_idct_plain(const int16_t *block, const int16_t *quantiser, uint8_t *out, ptrdiff_t stride) {
    int32_t half[8][8], in[8], done[8]; /* half[u][x] */
    for (int u = 0; u < 8; u++) {
        for (int v = 0; v < 8; v++) in[v] = (int16_t)(block[PLACE(u, v)] * quantiser[PLACE(u, v)]);
        transform(in, half[u], FIRST_ROUND, FIRST_SHIFT);
    }
    for (int x = 0; x < 8; x++) {
        for (int u = 0; u < 8; u++) in[u] = half[u][x];
        transform(in, done, SECOND_ROUND, SECOND_SHIFT);
        for (int y = 0; y < 8; y++) out[y * stride + x] = (uint8_t)(done[y] < 0 ? 0 : done[y] > 255 ? 255 : done[y]);
    }
}

#if JPEG_HAS_AVX2

#define PAIR(first, second) _mm256_set1_epi32((int)((uint32_t)(uint16_t)(first) | (uint32_t)(second) << 16))

/* Eight transforms at once: lane i of pair p holds inputs v and v + 4 of transform i. */
JPEG_INLINE JPEG_AVX2 void transform_avx2(const __m256i pairs[4], __m256i out[8], __m256i round, int shift) {
    __m256i low = _mm256_add_epi32(_mm256_madd_epi16(pairs[0], PAIR(UNIT, UNIT)), round);
    __m256i high = _mm256_add_epi32(_mm256_madd_epi16(pairs[0], PAIR(UNIT, -UNIT)), round);
    __m256i even2 = _mm256_madd_epi16(pairs[1], PAIR(EVEN_2_2, EVEN_2_6));
    __m256i even3 = _mm256_madd_epi16(pairs[1], PAIR(EVEN_3_2, EVEN_3_6));
    __m256i even[4] = {
        _mm256_add_epi32(low, even3), _mm256_add_epi32(high, even2),
        _mm256_sub_epi32(high, even2), _mm256_sub_epi32(low, even3)};
    __m256i odd[4] = {
        _mm256_add_epi32(
            _mm256_madd_epi16(pairs[2], PAIR(ODD_3_1, ODD_3_5)), _mm256_madd_epi16(pairs[3], PAIR(ODD_3_3, ODD_3_7))),
        _mm256_add_epi32(
            _mm256_madd_epi16(pairs[2], PAIR(ODD_2_1, ODD_2_5)), _mm256_madd_epi16(pairs[3], PAIR(ODD_2_3, ODD_2_7))),
        _mm256_add_epi32(
            _mm256_madd_epi16(pairs[2], PAIR(ODD_1_1, ODD_1_5)), _mm256_madd_epi16(pairs[3], PAIR(ODD_1_3, ODD_1_7))),
        _mm256_add_epi32(
            _mm256_madd_epi16(pairs[2], PAIR(ODD_0_1, ODD_0_5)), _mm256_madd_epi16(pairs[3], PAIR(ODD_0_3, ODD_0_7))),
    };
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_srai_epi32(_mm256_add_epi32(even[i], odd[i]), shift);
        out[7 - i] = _mm256_srai_epi32(_mm256_sub_epi32(even[i], odd[i]), shift);
    }
}

JPEG_AVX2 void jpeg_idct_avx2(const int16_t *block, const int16_t *quantiser, uint8_t *out, ptrdiff_t stride) {
    __m256i pairs[4], sums[8];
    for (int i = 0; i < 4; i++) {
        __m256i coefficients = _mm256_load_si256((const __m256i *)(block + 16 * i));
        pairs[i] = _mm256_mullo_epi16(coefficients, _mm256_load_si256((const __m256i *)(quantiser + 16 * i)));
    }
    transform_avx2(pairs, sums, _mm256_set1_epi32(FIRST_ROUND), FIRST_SHIFT); /* sums[x], lane u */

    /* Transposed: for each lane half, four u of x = 0 to 7 become x = 0 to 7 of four u. */
    __m256i x02 = _mm256_packs_epi32(sums[0], sums[2]), x13 = _mm256_packs_epi32(sums[1], sums[3]);
    __m256i x46 = _mm256_packs_epi32(sums[4], sums[6]), x57 = _mm256_packs_epi32(sums[5], sums[7]);
    __m256i x01 = _mm256_unpacklo_epi16(x02, x13), x23 = _mm256_unpackhi_epi16(x02, x13);
    __m256i x45 = _mm256_unpacklo_epi16(x46, x57), x67 = _mm256_unpackhi_epi16(x46, x57);
    __m256i low01 = _mm256_unpacklo_epi32(x01, x23), low23 = _mm256_unpackhi_epi32(x01, x23);
    __m256i high01 = _mm256_unpacklo_epi32(x45, x67), high23 = _mm256_unpackhi_epi32(x45, x67);
    __m256i rows[4] = { /* u and u + 4 */
        _mm256_unpacklo_epi64(low01, high01), _mm256_unpacklo_epi64(low23, high23),
        _mm256_unpackhi_epi64(low01, high01), _mm256_unpackhi_epi64(low23, high23)};
    const __m256i interleave = _mm256_setr_epi8(
        0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    for (int i = 0; i < 4; i++) pairs[i] = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(rows[i], 0xD8), interleave);

    transform_avx2(pairs, sums, _mm256_set1_epi32(SECOND_ROUND), SECOND_SHIFT); /* sums[y], lane x */
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int y = 0; y < 8; y += 4) {
        __m256i two = _mm256_packs_epi32(sums[y], sums[y + 1]), more = _mm256_packs_epi32(sums[y + 2], sums[y + 3]);
        __m256i four = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(two, more), order);
        __m128i first = _mm256_castsi256_si128(four), second = _mm256_extracti128_si256(four, 1);
        uint8_t *at = out + y * stride;
        _mm_storel_epi64((__m128i *)at, first);
        _mm_storel_epi64((__m128i *)(at + stride), _mm_unpackhi_epi64(first, first));
        _mm_storel_epi64((__m128i *)(at + 2 * stride), second);
        _mm_storel_epi64((__m128i *)(at + 3 * stride), _mm_unpackhi_epi64(second, second));
    }
}

#endif
