/* The weight of each input sample in each output sample of a resize.
 *
 * For halved colour planes the filter is composed with the usual decoder's upsampling (3/4 of the nearer sample, 1/4 of
 * the next), so that a plane is resized once. Double arithmetic without contraction, then integers that sum to exactly
 * one: a flat image stays flat.
 */
#include "jpeg.h"

#include <math.h>
#include <string.h>

static double bilinear(double x) {
    x = fabs(x);
    return x < 1 ? 1 - x : 0;
}

static double bicubic(double x) { /* a = -0.5 */
    x = fabs(x);
    if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
    return x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0;
}

typedef struct {
    int start, count;
    double *weights;
} taps;

/* The weights of full-size samples for output `i`, normalised. */
static void full_taps(const jpeg_request *q, int i, double *weights, taps *t) {
    double scale = (q->high - q->low) / q->num_outputs;
    double stretch = q->is_antialiased && scale > 1 ? scale : 1;
    double support = (q->filter == JPEG_BICUBIC ? 2 : 1) * stretch;
    double centre = q->low + (i + 0.5) * scale, sum = 0;
    int start = (int)floor(centre - support + 0.5), end = (int)floor(centre + support + 0.5);
    start = start < q->floor ? q->floor : start;
    end = end > q->ceiling ? q->ceiling : end;
    for (int x = start; x < end; x++) {
        double at = (x + 0.5 - centre) / stretch;
        sum += weights[x - start] = q->filter == JPEG_BICUBIC ? bicubic(at) : bilinear(at);
    }
    if (end <= start || sum == 0) { /* a box narrower than a sample at the very edge */
        start = (int)centre;
        start = start < q->floor ? q->floor : start >= q->ceiling ? q->ceiling - 1 : start;
        end = start + 1;
        weights[0] = sum = 1;
    }
    for (int x = start; x < end; x++) weights[x - start] /= sum;
    *t = (taps){start, end - start, weights};
}

/* The same output made of the samples of a plane of half the size. */
static void halved_taps(const taps *full, int length, int is_smooth, double *weights, taps *t) {
    int half = (length + 1) / 2;
    int start = full->start / 2 - is_smooth, end = (full->start + full->count - 1) / 2 + 1 + is_smooth;
    start = start < 0 ? 0 : start;
    end = end > half ? half : end;
    memset(weights, 0, (size_t)(end - start) * sizeof *weights);
    for (int i = 0; i < full->count; i++) {
        int x = full->start + i, near = x / 2, next = x & 1 ? near + 1 : near - 1;
        next = next < 0 ? 0 : next >= half ? half - 1 : next;
        weights[near - start] += full->weights[i] * (is_smooth ? 0.75 : 1);
        if (is_smooth) weights[next - start] += full->weights[i] * 0.25;
    }
    while (end - start > 1 && weights[end - 1 - start] == 0) end--;
    int empty = 0;
    while (end - start - empty > 1 && weights[empty] == 0) empty++;
    *t = (taps){start + empty, end - start - empty, weights + empty};
}

static void round_taps(const taps *t, int16_t *out) {
    int left = 1 << JPEG_WEIGHT_BITS, largest = 0;
    for (int i = 0; i < t->count; i++) {
        out[i] = (int16_t)floor(t->weights[i] * (1 << JPEG_WEIGHT_BITS) + 0.5);
        left -= out[i];
        if (out[i] > out[largest]) largest = i;
    }
    out[largest] = (int16_t)(out[largest] + left);
}

int jpeg_make_axis(const jpeg_request *q, int is_halved, jpeg_arena *arena, jpeg_axis *axis) {
    double scale = (q->high - q->low) / q->num_outputs;
    double stretch = q->is_antialiased && scale > 1 ? scale : 1;
    int most = (int)(2 * (q->filter == JPEG_BICUBIC ? 2 : 1) * stretch) + 4, n = q->num_outputs;
    size_t max_taps = (size_t)most;
    double *full = jpeg_take(arena, max_taps * sizeof *full), *all = jpeg_take(arena, (size_t)n * max_taps * sizeof *all);
    taps *made = jpeg_take(arena, (size_t)n * sizeof *made);
    axis->starts = jpeg_take(arena, (size_t)n * sizeof *axis->starts);
    if (full == NULL || all == NULL || made == NULL || axis->starts == NULL) return JPEG_OTHER;
    int widest = 2;
    for (int i = 0; i < n; i++) {
        taps whole;
        full_taps(q, i, is_halved ? full : all + i * max_taps, &whole);
        made[i] = whole;
        if (is_halved) halved_taps(&whole, q->length, q->is_smooth, all + i * max_taps, &made[i]);
        widest = made[i].count > widest ? made[i].count : widest;
    }
    widest += widest & 1;
    axis->weights = jpeg_take(arena, (size_t)n * (size_t)widest * sizeof *axis->weights);
    if (axis->weights == NULL) return JPEG_OTHER;
    memset(axis->weights, 0, (size_t)n * (size_t)widest * sizeof *axis->weights);
    axis->num_outputs = n;
    axis->num_taps = widest;
    axis->first = made[0].start;
    axis->last = 0;
    for (int i = 0; i < n; i++) {
        axis->starts[i] = made[i].start;
        axis->first = made[i].start < axis->first ? made[i].start : axis->first;
        axis->last = made[i].start + made[i].count > axis->last ? made[i].start + made[i].count : axis->last;
        round_taps(&made[i], axis->weights + (size_t)i * (size_t)widest);
    }
    return JPEG_DONE;
}
