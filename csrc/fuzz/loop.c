/* A fuzzing loop for compilers without libFuzzer: mutated copies of the files given, for a number of executions.
 *
 *     fuzz EXECUTIONS SEED FILE...
 *
 * The input that runs is kept in the file `running`, so that a crash can be repeated: `fuzz 0 0 running`. First comes
 * an image of 9000 x 9000 that is too large to be mutated.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
extern long fuzz_decoded;
extern int64_t fuzz_max_pixels;

enum { MAX_BYTES = 1 << 20 };

static uint64_t state;

static uint64_t random_below(uint64_t below) { /* splitmix64 */
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (z ^ z >> 31) % below;
}

typedef struct {
    uint8_t *data;
    size_t size;
} file;

static file read_file(const char *path) {
    file f = {malloc(MAX_BYTES), 0};
    FILE *stream = fopen(path, "rb");
    if (stream == NULL) {
        perror(path);
        exit(2);
    }
    f.size = fread(f.data, 1, MAX_BYTES, stream);
    fclose(stream);
    return f;
}

static void free_files(file *files, size_t num_files) {
    for (size_t i = 0; i < num_files; i++) free(files[i].data);
    free(files);
}

/* A gray image whose blocks are each brighter than the last by the most that a code can say: sums of these differences
 * exceed 31 bits. A block is 13 bits: the code 0, the difference 2047, and the code 0 for the end of the block. */
static file brightening(int side) {
    static const uint8_t tables[] = {0xFF, 0xC4, 0, 20, 0x00, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 11,
                                     0xFF, 0xC4, 0, 20, 0x10, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    uint8_t frame[] = {0xFF, 0xC0, 0, 11, 8, (uint8_t)(side >> 8), (uint8_t)side, (uint8_t)(side >> 8), (uint8_t)side,
                       1, 1, 0x11, 0};
    static const uint8_t scan[] = {0xFF, 0xDA, 0, 8, 1, 1, 0x00, 0, 63, 0};
    size_t num_blocks = (size_t)((side + 7) / 8) * (size_t)((side + 7) / 8);
    file f = {malloc(256 + num_blocks * 4), 0};
    uint8_t *out = f.data;
    *out++ = 0xFF, *out++ = 0xD8, *out++ = 0xFF, *out++ = 0xDB, *out++ = 0, *out++ = 67, *out++ = 0;
    memset(out, 1, 64), out += 64;
    memcpy(out, frame, sizeof frame), out += sizeof frame;
    memcpy(out, tables, sizeof tables), out += sizeof tables;
    memcpy(out, scan, sizeof scan), out += sizeof scan;
    uint64_t bits = 0;
    int count = 0;
    for (size_t block = 0; block <= num_blocks; block++) {
        bits = bits << 13 | (block < num_blocks ? 0x0FFE : 0x1FFF); /* the last one pads with ones */
        for (count += 13; count >= 8; count -= 8) {
            uint8_t byte = (uint8_t)(bits >> (count - 8));
            *out++ = byte;
            if (byte == 0xFF) *out++ = 0;
        }
    }
    *out++ = 0xFF, *out++ = 0xD9;
    f.size = (size_t)(out - f.data) + 10;
    memset(out, 0, 10);
    /* The target takes the box from the last bytes: this one is the whole image, with all of its pixels. 223 is 1 / 31 modulo 256. */
    static const uint8_t choices[8] = {0, 0, 255, 255, 0, 0, 4};
    for (size_t i = 0; i < 8; i++)
        f.data[f.size - 3 - i] = (uint8_t)((choices[i] - f.data[f.size / 2] - (int)i) * 223);
    return f;
}

/* Half of all changes fall on the first 700 bytes, where the headers are. */
static size_t place(size_t size) { return random_below(2) && size > 700 ? random_below(700) : random_below(size); }

static size_t mutate(uint8_t *data, size_t size, const file *other) {
    static const uint8_t telling[] = {0x00, 0x01, 0x7F, 0x80, 0xFF, 0xD8, 0xD9, 0xDA, 0xC4, 0xDB, 0xC0, 0xDD, 0xD0, 0xE1};
    for (uint64_t changes = 1 + random_below(random_below(4) ? 4 : 40); changes > 0 && size > 16; changes--) {
        size_t at = place(size), length = 1 + random_below(32);
        switch (random_below(9)) {
        case 0: data[at] ^= (uint8_t)(1 << random_below(8)); break;
        case 1: data[at] = (uint8_t)random_below(256); break;
        case 2: data[at] = telling[random_below(sizeof telling)]; break;
        case 3: data[at] = (uint8_t)(data[at] + (int)random_below(9) - 4); break;
        case 4: /* take away */
            if (at + length < size) memmove(data + at, data + at + length, size - at - length), size -= length;
            break;
        case 5: /* put in */
            if (size + length < MAX_BYTES) {
                memmove(data + at + length, data + at, size - at);
                size += length;
                for (size_t i = 0; i < length; i++) data[at + i] = (uint8_t)random_below(256);
            }
            break;
        case 6: /* repeat what lies elsewhere */
            if (at + length < size) memmove(data + at, data + random_below(size - length), length);
            break;
        case 7: /* the rest of another file */
            if (random_below(8) == 0 && at < other->size) {
                memcpy(data + at, other->data + at, other->size - at);
                size = other->size;
            }
            break;
        default: /* cut off */
            if (random_below(16) == 0) size = at + 1;
        }
    }
    return size;
}

int main(int count, char **arguments) {
    if (count < 4) return 2;
    long executions = atol(arguments[1]);
    state = (uint64_t)atol(arguments[2]);
    size_t num_files = (size_t)count - 3;
    file *files = calloc(num_files, sizeof *files);
    int64_t max_pixels = fuzz_max_pixels;
    fuzz_max_pixels = 1 << 27;
    file large = brightening(9000);
    LLVMFuzzerTestOneInput(large.data, large.size);
    free(large.data);
    if (fuzz_decoded != 1) return fprintf(stderr, "the image of 9000 x 9000 was not decoded\n"), 3;
    fuzz_max_pixels = max_pixels;
    for (size_t i = 0; i < num_files; i++) {
        files[i] = read_file(arguments[3 + i]);
        LLVMFuzzerTestOneInput(files[i].data, files[i].size);
    }
    if (executions == 0) return free_files(files, num_files), 0;
    int running = open("running", O_RDWR | O_CREAT, 0644);
    if (running < 0 || ftruncate(running, MAX_BYTES + 8) != 0) return 2;
    uint8_t *shared = mmap(NULL, MAX_BYTES + 8, PROT_READ | PROT_WRITE, MAP_SHARED, running, 0);
    if (shared == MAP_FAILED) return 2;
    for (long i = 0; i < executions; i++) {
        const file *from = &files[random_below(num_files)];
        memcpy(shared, from->data, from->size);
        size_t size = mutate(shared, from->size, &files[random_below(num_files)]);
        LLVMFuzzerTestOneInput(shared, size);
        if ((i + 1) % 100000 == 0) printf("%ld executions, %ld decoded\n", i + 1, fuzz_decoded), fflush(stdout);
    }
    printf("%ld executions, %ld decoded, no finding\n", executions, fuzz_decoded);
    free_files(files, num_files);
    return ftruncate(running, 0) != 0;
}
