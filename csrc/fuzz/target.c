/* One execution: a file and, taken from its last bytes, a box and a size; with and without vector instructions.
 *
 * File and image lie in blocks of their exact sizes, so that the address sanitizer sees every byte beyond them. Both
 * ways must agree on whether the file decodes and, if it does, on every bit. Then the same as a task of two files.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int reconv_jpeg_size(const uint8_t *data, size_t size, int32_t size_out[2]);
int reconv_jpeg_crop(
    const uint8_t *data, size_t size, double left, double top, double right, double bottom, int is_cut, uint8_t *out,
    int height, int width, int is_interleaved, int is_antialiased, int filter, int may_use_avx2);
int reconv_jpeg_read(
    const char *const *paths, int num_files, uint8_t *buffer, int64_t capacity, int64_t *ends, int32_t *sizes);
void reconv_jpeg_crops(
    const uint8_t *const *files, const int64_t *lengths, int num_files, const double *boxes, int is_cut, uint8_t *out,
    int size, int is_antialiased, int filter, uint8_t *is_done, int num_threads);

enum { NUM_CHOICES = 8 };

long fuzz_decoded;                /* executions that decoded an image */
int64_t fuzz_max_pixels = 1 << 20; /* larger images are left out */

/* The file twice, read and cropped by the two calls for tasks; both rows must be what the file alone gives. */
static void run_task(const uint8_t *data, size_t size, const double box[4], int side, int flags) {
    static int file = -1;
    static char path[64];
    if (file < 0) file = memfd_create("task", 0), snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    if (ftruncate(file, 0) != 0 || pwrite(file, data, size, 0) != (ssize_t)size) abort();
    const char *paths[3] = {path, path, path};
    double boxes[8];
    memcpy(boxes, box, 4 * sizeof *box), memcpy(boxes + 4, box, 4 * sizeof *box);
    size_t row_bytes = 3 * (size_t)side * (size_t)side;
    uint8_t *buffer = malloc(2 * size), *out = malloc(2 * row_bytes), *alone = malloc(row_bytes);
    int64_t ends[3];
    int32_t sizes[6];
    uint8_t is_done[2];
    if (reconv_jpeg_read(paths, 3, buffer, (int64_t)(2 * size), ends, sizes) != 2) abort(); /* the third has no room */
    const uint8_t *files[2] = {buffer, buffer + ends[0]};
    const int64_t lengths[2] = {ends[0], ends[1] - ends[0]};
    reconv_jpeg_crops(files, lengths, 2, boxes, 1, out, side, flags & 4, (flags & 8) != 0, is_done, 1 + (flags & 1));
    int is_made = reconv_jpeg_crop(
                      data, size, box[0], box[1], box[2], box[3], 1, alone, side, side, 0, flags & 4, (flags & 8) != 0,
                      1) == 0;
    for (int i = 0; i < 2; i++)
        if (is_done[i] != is_made || (is_made && memcmp(out + i * row_bytes, alone, row_bytes) != 0)) abort();
    free(buffer);
    free(out);
    free(alone);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    int32_t found[2] = {0, 0};
    uint8_t choice[NUM_CHOICES] = {0};
    if (size < NUM_CHOICES) return 0;
    /* The file's end stays in place: what is chosen also follows from it. */
    for (size_t i = 0; i < NUM_CHOICES; i++) choice[i] = (uint8_t)(input[size - 3 - i % (size - 2)] * 31 + input[size / 2] + i);
    uint8_t *data = malloc(size);
    memcpy(data, input, size);
    if (reconv_jpeg_size(data, size, found) != 0 || (int64_t)found[0] * found[1] > fuzz_max_pixels) {
        free(data);
        return 0;
    }
    double left = found[0] * (choice[0] / 512.0), top = found[1] * (choice[1] / 512.0);
    double right = left + (found[0] - left) * ((choice[2] + 1) / 256.0);
    double bottom = top + (found[1] - top) * ((choice[3] + 1) / 256.0);
    int flags = choice[6], height = 1 + choice[4] % 48, width = 1 + choice[5] % 48;
    if (flags & 16) left = (int)left, top = (int)top, right = (int)right + 1, bottom = (int)bottom + 1;
    if (right > found[0]) right = found[0];
    if (bottom > found[1]) bottom = found[1];
    size_t num_bytes = 3 * (size_t)height * (size_t)width;
    uint8_t *plain = malloc(num_bytes), *vectors = malloc(num_bytes);
    int first = reconv_jpeg_crop(
        data, size, left, top, right, bottom, flags & 1, plain, height, width, flags & 2, flags & 4, (flags & 8) != 0, 0);
    int second = reconv_jpeg_crop(
        data, size, left, top, right, bottom, flags & 1, vectors, height, width, flags & 2, flags & 4, (flags & 8) != 0, 1);
    if (first != second || (first == 0 && memcmp(plain, vectors, num_bytes) != 0)) abort();
    fuzz_decoded += first == 0;
    run_task(data, size, (double[4]){left, top, right, bottom}, height, flags);
    free(plain);
    free(vectors);
    free(data);
    return 0;
}
