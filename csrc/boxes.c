/* The boxes of random resized crops: `random_resized_crop_box` of data/transforms/geometry.py, to the last bit.
 *
 * Python rounds doubles as C does, halves to even, and takes its exponentials from the same library.
 */
#include "jpeg.h"

#include <math.h>

static double at_most(double value, double limit) { return value < limit ? value : limit; }

static double at_least_one(double value) { return value > 1 ? value : 1; }

/* The largest centered box whose ratio is in range. */
static void centered_box(double width, double height, const jpeg_crop_rule *rule, double *box) {
    double across = width, down = height;
    if (width / height < rule->min_ratio) {
        down = at_least_one(at_most(height, rint(width / rule->min_ratio)));
    } else if (width / height > rule->max_ratio) {
        across = at_least_one(at_most(width, rint(height * rule->max_ratio)));
    }
    box[0] = floor((width - across) / 2), box[1] = floor((height - down) / 2);
    box[2] = box[0] + across, box[3] = box[1] + down;
}

/* The first random box that fits. `areas` and `ratios` hold `num_attempts` uniforms, `position` two. */
static void random_box(
    double width, double height, const double *areas, const double *ratios, const double *position,
    const jpeg_crop_rule *rule, double *box) {
    double pixels = width * height, span = rule->max_scale - rule->min_scale;
    double low = log(rule->min_ratio), range = log(rule->max_ratio) - low;
    for (int i = 0; i < rule->num_attempts; i++) {
        double area = pixels * (rule->min_scale + areas[i] * span), aspect = exp(low + ratios[i] * range);
        double across = rint(sqrt(area * aspect)), down = rint(sqrt(area / aspect));
        if (across > 0 && across <= width && down > 0 && down <= height) {
            box[0] = floor(position[0] * (width - across + 1)), box[1] = floor(position[1] * (height - down + 1));
            box[2] = box[0] + across, box[3] = box[1] + down;
            return;
        }
    }
    if (rule->falls_back_to_whole) {
        box[0] = box[1] = 0, box[2] = width, box[3] = height;
    } else {
        centered_box(width, height, rule, box);
    }
}

/* The box of each image from its width and height in `sizes`; an empty one where it has no pixels or more than
 * `max_pixels`. The strides are those of rows, in numbers. */
EXPORT void reconv_crop_boxes(
    const int32_t *sizes, int num_images, int64_t max_pixels, const double *areas, int64_t area_stride,
    const double *ratios, int64_t ratio_stride, const double *positions, int64_t position_stride,
    const jpeg_crop_rule *rule, double *boxes) {
    for (int i = 0; i < num_images; i++) {
        int64_t width = sizes[2 * i], height = sizes[2 * i + 1];
        double *box = boxes + 4 * i;
        box[0] = box[1] = box[2] = box[3] = 0;
        if (width < 1 || height < 1 || width * height > max_pixels) continue;
        random_box(
            (double)width, (double)height, areas + i * area_stride, ratios + i * ratio_stride,
            positions + i * position_stride, rule, box);
    }
}
