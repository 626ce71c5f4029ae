/* A fuzzing loop for compilers without libFuzzer: mutated copies of the files given, for a number of executions.
 *
 *     fuzz EXECUTIONS SEED FILE...
 *
 * The input that runs is kept in the file `running`, so that a crash can be repeated: `fuzz 0 0 running`.
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
    for (size_t i = 0; i < num_files; i++) {
        files[i] = read_file(arguments[3 + i]);
        LLVMFuzzerTestOneInput(files[i].data, files[i].size);
    }
    if (executions == 0) return 0;
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
    return ftruncate(running, 0) != 0;
}
