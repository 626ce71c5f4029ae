/* One execution: a file and, taken from its last bytes, a box and a size; with and without vector instructions.
 *
 * File and picture lie in blocks of their exact sizes, so that the address sanitizer sees every byte beyond them. Both
 * ways must agree on whether the file is taken and, if it is, on every bit.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int reconv_jpeg_size(const uint8_t *data, size_t size, int32_t size_out[2]);
int reconv_jpeg_crop(
    const uint8_t *data, size_t size, double left, double top, double right, double bottom, int is_cut, uint8_t *out,
    int height, int width, int is_interleaved, int is_antialiased, int filter, int may_use_avx2);

enum { NUM_CHOICES = 8, MAX_PIXELS = 1 << 20 };

long fuzz_taken; /* executions that made a picture */

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    int32_t found[2] = {0, 0};
    uint8_t choice[NUM_CHOICES] = {0};
    if (size < NUM_CHOICES) return 0;
    /* The file's end stays in place: what is chosen also follows from it. */
    for (size_t i = 0; i < NUM_CHOICES; i++) choice[i] = (uint8_t)(input[size - 3 - i % (size - 2)] * 31 + input[size / 2] + i);
    uint8_t *data = malloc(size);
    memcpy(data, input, size);
    if (reconv_jpeg_size(data, size, found) != 0 || (int64_t)found[0] * found[1] > MAX_PIXELS) {
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
    fuzz_taken += first == 0;
    free(plain);
    free(vectors);
    free(data);
    return 0;
}
