/* Indices as 16-bit gaps and as a bitmap; the bytes are defined in thinwire/kernels/reference_codings.py. */
#include <string.h>

#include "tw.h"

#define EXPORT __attribute__((visibility("default")))

enum { ESCAPE = 0xFFFF };

/* Returns the number of words, or -1 when the indices do not ascend strictly within 0 .. numel - 1. */
EXPORT int64_t tw_delta16_pack(const int32_t *indices, int64_t count, int64_t numel, uint16_t *words) {
    int64_t previous = -1, written = 0;
    for (int64_t j = 0; j < count; j++) {
        int64_t gap = indices[j] - previous - 1;
        if (gap < 0 || indices[j] >= numel) return -1;
        for (; gap >= ESCAPE; gap -= ESCAPE) words[written++] = ESCAPE;
        words[written++] = (uint16_t)gap;
        previous = indices[j];
    }
    return written;
}

/* Returns 0, or -1 when the words do not decode to exactly `count` indices below `numel`. */
EXPORT int tw_delta16_unpack(const uint8_t *bytes, int64_t words, int64_t count, int64_t numel, int32_t *indices) {
    int64_t position = -1, found = 0;
    int ended = 1;
    for (int64_t w = 0; w < words; w++) {
        uint16_t word;
        memcpy(&word, bytes + 2 * w, sizeof word);
        ended = word != ESCAPE;
        position += ended ? word + 1 : ESCAPE;
        if (position >= numel || (ended && found == count)) return -1;
        if (ended) indices[found++] = (int32_t)position;
    }
    return ended && found == count ? 0 : -1;
}

/* `bits` holds (numel + 7) / 8 zeros. Returns 0, or -1 when the indices do not ascend strictly within the range. */
EXPORT int tw_bitmap_pack(const int32_t *indices, int64_t count, int64_t numel, uint8_t *bits) {
    int64_t previous = -1;
    for (int64_t j = 0; j < count; j++) {
        if (indices[j] <= previous || indices[j] >= numel) return -1;
        previous = indices[j];
        bits[previous / 8] = (uint8_t)(bits[previous / 8] | 1 << previous % 8);
    }
    return 0;
}

/* Returns 0, or -1 when the bits do not hold exactly `count` indices below `numel`. */
EXPORT int tw_bitmap_unpack(const uint8_t *bits, int64_t bytes, int64_t count, int64_t numel, int32_t *indices) {
    int64_t found = 0;
    for (int64_t first = 0; first < bytes; first += 8) {
        uint64_t word = 0; /* assembled byte by byte at the end, and the same on any byte order */
        int64_t width = bytes - first < 8 ? bytes - first : 8;
        for (int64_t b = 0; b < width; b++) word |= (uint64_t)bits[first + b] << 8 * b;
        for (; word; word &= word - 1) {
            int64_t position = 8 * first + __builtin_ctzll(word);
            if (found == count || position >= numel) return -1;
            indices[found++] = (int32_t)position;
        }
    }
    return found == count ? 0 : -1;
}
