/* The files of a task in two calls: read them all (or take them from memory), then crop each. Python releases the GIL
 * once per call, not per image.
 *
 * Nothing outside the given arrays is written. A file that cannot be read whole counts as empty; the caller reports why.
 */
#define _POSIX_C_SOURCE 200809L
#include "jpeg.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* Bytes of a regular file read into `buffer`: 0 where it cannot be read whole, -1 where it does not fit. */
static int64_t read_file(const char *path, uint8_t *buffer, int64_t capacity) {
    struct stat status;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* never blocks on a pipe */
    if (file < 0) return 0;
    int64_t size = fstat(file, &status) == 0 && S_ISREG(status.st_mode) ? (int64_t)status.st_size : 0;
    int64_t done = size > capacity ? -1 : 0;
    while (done >= 0 && done < size) {
        ssize_t count = read(file, buffer + done, (size_t)(size - done));
        if (count <= 0) break;
        done += count;
    }
    close(file);
    return done < 0 || done == size ? done : 0;
}

/* Reads files one after the other into `buffer` until one does not fit, and returns how many did. File i ends at
 * `ends[i]`; `sizes` gets its width and height, 0 where it is not of the kind that is decoded here. */
EXPORT int reconv_jpeg_read(
    const char *const *paths, int num_files, uint8_t *buffer, int64_t capacity, int64_t *ends, int32_t *sizes) {
    int64_t at = 0;
    for (int i = 0; i < num_files; i++) {
        int64_t count = read_file(paths[i], buffer + at, capacity - at);
        if (count < 0) return i;
        sizes[2 * i] = sizes[2 * i + 1] = 0;
        if (count > 0) reconv_jpeg_size(buffer + at, (size_t)count, sizes + 2 * i);
        ends[i] = at += count;
    }
    return num_files;
}

/* Width and height of each of `num_files` files in memory, 0 where one is not of the kind that is decoded here. */
EXPORT void reconv_jpeg_sizes(
    const uint8_t *const *files, const int64_t *lengths, int num_files, int32_t *sizes) {
    for (int i = 0; i < num_files; i++) {
        sizes[2 * i] = sizes[2 * i + 1] = 0;
        if (lengths[i] > 0) reconv_jpeg_size(files[i], (size_t)lengths[i], sizes + 2 * i);
    }
}

void jpeg_crop_file(jpeg_job *job, int file) {
    const double *box = job->boxes + 4 * file;
    uint8_t *row = job->out + 3 * (size_t)job->size * (size_t)job->size * (size_t)file;
    job->is_done[file] = reconv_jpeg_crop(
                             job->files[file], (size_t)job->lengths[file], box[0], box[1], box[2], box[3], job->is_cut,
                             row, job->size, job->size, 0, job->is_antialiased, job->filter, 1) == JPEG_DONE;
}

/* A crop of each file, into planes of `size` x `size` that follow each other in `out`; `boxes` holds left, top, right and
 * bottom of each, `is_done` is set for those that were filled. A file with an empty box is skipped. */
EXPORT void reconv_jpeg_crops(
    const uint8_t *const *files, const int64_t *lengths, int num_files, const double *boxes, int is_cut, uint8_t *out,
    int size, int is_antialiased, int filter, uint8_t *is_done, int num_threads) {
    jpeg_job job = {
        .files = files, .lengths = lengths, .num_files = num_files, .boxes = boxes, .is_cut = is_cut, .out = out,
        .size = size, .is_antialiased = is_antialiased, .filter = filter, .is_done = is_done,
    };
    jpeg_run_job(&job, num_threads);
}
