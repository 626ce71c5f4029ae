/* Parses a file from its first byte to the first byte of its scan.
 *
 * Accepts one baseline Huffman scan of 8-bit grey or YCbCr, upright, with the usual markers; anything unusual is
 * rejected. No byte outside the file is read.
 */
#include "jpeg.h"

#include <string.h>

typedef struct {
    const uint8_t *data;
    size_t size;
} part;

typedef struct {
    int has_jfif, has_adobe, has_exif, has_frame;
} seen;

static int u16(const uint8_t *at) { return at[0] << 8 | at[1]; }

static int starts_with(part p, const char *text, size_t length) {
    return p.size >= length && memcmp(p.data, text, length) == 0;
}

/* Whether XMP has no orientation other than the first. */
static int xmp_is_upright(part p) {
    static const char word[] = "Orientation";
    const size_t length = sizeof word - 1;
    const uint8_t *end = p.data + p.size, *at = p.data;
    while ((at = memchr(at, word[0], (size_t)(end - at))) != NULL && (size_t)(end - at) >= length) {
        const uint8_t *from = at++, *after = from + length;
        size_t left = (size_t)(end - after);
        if (memcmp(from, word, length) != 0) continue;
        int is_closing = from - p.data >= 7 && memcmp(from - 7, "</tiff:", 7) == 0;
        int is_first = (left >= 4 && memcmp(after, "=\"1\"", 4) == 0) || (left >= 3 && memcmp(after, ">1<", 3) == 0);
        if (!is_closing && !is_first) return 0;
    }
    return 1;
}

static unsigned exif_number(const uint8_t *at, int num_bytes, int is_little) {
    unsigned value = 0;
    for (int i = 0; i < num_bytes; i++) value = value << 8 | at[is_little ? num_bytes - 1 - i : i];
    return value;
}

/* Whether the EXIF block is well-formed as far as it is read and does not rotate the image. */
static int exif_is_upright(part tiff) {
    if (tiff.size < 8) return 0;
    int is_little = memcmp(tiff.data, "II\x2a\0", 4) == 0;
    if (!is_little && memcmp(tiff.data, "MM\0\x2a", 4) != 0) return 0;
    size_t directory = exif_number(tiff.data + 4, 4, is_little);
    if (directory < 8 || directory > tiff.size - 2) return 0;
    size_t count = exif_number(tiff.data + directory, 2, is_little);
    if (count * 12 > tiff.size - directory - 2) return 0;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *entry = tiff.data + directory + 2 + i * 12;
        if (exif_number(entry, 2, is_little) != 0x0112) continue;
        int is_one_short = exif_number(entry + 2, 2, is_little) == 3 && exif_number(entry + 4, 4, is_little) == 1;
        if (!is_one_short || exif_number(entry + 8, 2, is_little) != 1) return 0;
    }
    return 1;
}

static int read_application(int marker, part p, seen *s) {
    if (marker == 0xE0 && starts_with(p, "JFIF", 4)) {
        s->has_jfif = 1;
        return p.size >= 14;
    }
    if (marker == 0xE1) {
        if (starts_with(p, "Exif\0", 5)) {
            if (s->has_exif || !starts_with(p, "Exif\0\0", 6)) return 0;
            s->has_exif = 1;
            return exif_is_upright((part){p.data + 6, p.size - 6});
        }
        return xmp_is_upright(p);
    }
    if (marker == 0xE2) {
        if (starts_with(p, "ICC_PROFILE", 11)) return p.size > 14;
        return !starts_with(p, "MPF", 3); /* several images in one file */
    }
    if (marker == 0xEE && starts_with(p, "Adobe", 5)) {
        s->has_adobe = 1;
        return p.size >= 12 && p.data[11] == 1;
    }
    return 1;
}

static int read_quantisers(part p, jpeg_header *h) {
    while (p.size > 0) {
        int table = p.data[0];
        if (table > 3 || p.size < 65) return 0; /* the upper half is the precision: 8 bits alone */
        for (int i = 0; i < 64; i++) {
            if (p.data[1 + i] == 0) return 0;
            h->quantisers[table][i] = p.data[1 + i];
        }
        h->has_quantiser[table] = 1;
        p.data += 65;
        p.size -= 65;
    }
    return 1;
}

static int read_codes(part p, jpeg_header *h) {
    while (p.size > 0) {
        if (p.size < 17) return 0;
        int table = p.data[0] & 15, kind = p.data[0] >> 4, total = 0;
        if (table > 3 || kind > 1) return 0;
        jpeg_codes *codes = kind ? &h->ac[table] : &h->dc[table];
        memset(codes, 0, sizeof *codes);
        for (int length = 1; length <= 16; length++) total += codes->counts[length] = p.data[length];
        if (total == 0 || total > 256 || p.size - 17 < (size_t)total) return 0;
        memcpy(codes->symbols, p.data + 17, (size_t)total);
        codes->num_symbols = total;
        p.data += 17 + total;
        p.size -= 17 + (size_t)total;
    }
    return 1;
}

static int read_frame(part p, jpeg_header *h, seen *s) {
    if (s->has_frame || p.size < 6 || p.data[0] != 8) return 0;
    s->has_frame = 1;
    h->height = u16(p.data + 1);
    h->width = u16(p.data + 3);
    h->num_components = p.data[5];
    if (h->width == 0 || h->height == 0 || (h->num_components != 1 && h->num_components != 3)) return 0;
    if (p.size != 6 + 3 * (size_t)h->num_components) return 0;
    for (int i = 0; i < h->num_components; i++) {
        const uint8_t *at = p.data + 6 + 3 * i;
        int across = at[1] >> 4, down = at[1] & 15;
        jpeg_component *c = &h->components[i];
        if (across < 1 || down < 1 || across > 4 || down > 4 || at[2] > 3) return 0;
        for (int j = 0; j < i; j++)
            if (h->components[j].id == at[0]) return 0;
        *c = (jpeg_component){.id = at[0], .across = across, .down = down, .quantiser = at[2]};
        if (h->num_components == 1) c->across = c->down = 1; /* a single component's MCU is one block */
        else if (i == 0 ? across > 2 || down > 2 : across != 1 || down != 1) return 0;
    }
    h->max_across = h->components[0].across;
    h->max_down = h->components[0].down;
    return 1;
}

static int read_scan(part p, jpeg_header *h, const seen *s) {
    int n = h->num_components;
    if (!s->has_frame || p.size != 4 + 2 * (size_t)n || p.data[0] != n) return 0;
    for (int i = 0; i < n; i++) {
        jpeg_component *c = &h->components[i];
        int dc = p.data[2 + 2 * i] >> 4, ac = p.data[2 + 2 * i] & 15;
        if (p.data[1 + 2 * i] != c->id || dc > 3 || ac > 3) return 0;
        if (!h->has_quantiser[c->quantiser] || h->dc[dc].num_symbols == 0 || h->ac[ac].num_symbols == 0) return 0;
        c->dc_codes = dc;
        c->ac_codes = ac;
    }
    const uint8_t *spectral = p.data + 1 + 2 * n;
    if (spectral[0] != 0 || spectral[1] != 63 || spectral[2] != 0) return 0;
    if (n == 1) return 1;
    int is_numbered = h->components[0].id == 1 && h->components[1].id == 2 && h->components[2].id == 3;
    return s->has_jfif || s->has_adobe || is_numbered; /* else it might be RGB */
}

static int read_segment(int marker, part p, jpeg_header *h, seen *s) {
    switch (marker) {
    case 0xDB: return read_quantisers(p, h);
    case 0xC4: return read_codes(p, h);
    case 0xC0:
    case 0xC1: return read_frame(p, h, s);
    case 0xDD:
        if (p.size != 2) return 0;
        h->restart_interval = u16(p.data);
        return 1;
    case 0xDA: return read_scan(p, h, s);
    case 0xFE: return 1;
    default: return marker >= 0xE0 && marker <= 0xEF && read_application(marker, p, s);
    }
}

int jpeg_read_header(const uint8_t *data, size_t size, jpeg_header *h) {
    seen s = {0};
    size_t at = 2;
    memset(h, 0, sizeof *h);
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return JPEG_OTHER;
    while (size - at >= 4) {
        if (data[at] != 0xFF) return JPEG_OTHER;
        int marker = data[at + 1];
        size_t length = (size_t)u16(data + at + 2);
        if (length < 2 || length > size - at - 2) return JPEG_OTHER;
        if (!read_segment(marker, (part){data + at + 4, length - 2}, h, &s)) return JPEG_OTHER;
        at += 2 + length;
        if (marker == 0xDA) {
            h->scan_start = at;
            return JPEG_DONE;
        }
    }
    return JPEG_OTHER;
}
