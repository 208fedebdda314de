/* The functions that Python calls, and the choice of the instruction set. */
#include <string.h>

#include "tw.h"

#define EXPORT __attribute__((visibility("default")))

#define SUMMED_ELEMS 4096 /* of a sum of several rows at a time: 16 KiB */

enum { LEVEL_PORTABLE, LEVEL_AVX2, LEVEL_AVX512 };

static const tw_kernels *active; /* the best for this machine unless a test asks for another */

EXPORT int tw_best_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2"))
        return LEVEL_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return LEVEL_AVX2;
#endif
    return LEVEL_PORTABLE;
}

/* Call once before anything else; a level above the best one would stop the process with an illegal instruction. */
EXPORT void tw_use_level(int level) {
    active = &tw_portable;
#if defined(__x86_64__)
    if (level == LEVEL_AVX2) active = &tw_avx2;
    if (level == LEVEL_AVX512) active = &tw_avx512;
#endif
}

EXPORT int tw_compensate(const float *grad, const float *residual, float decay, float *velocity, float momentum,
                         float *out, int64_t n) {
    return active->compensate(grad, residual, decay, velocity, momentum, out, n);
}

EXPORT int tw_threshold_pack(const float *grad, const float *residual, float *out, int64_t segments,
                             const int64_t *offsets, const float *thresholds, float *values, int32_t *indices,
                             int64_t *counts) {
    return active->threshold_pack(grad, residual, out, segments, offsets, thresholds, values, indices, counts);
}

EXPORT int tw_row_topk(const float *grad, const float *residual, float *out, int64_t segments, const int64_t *offsets,
                       const int64_t *row_lengths, const int64_t *ks, float *values, int32_t *indices,
                       const tw_scratch *scratch) {
    return active->row_topk(grad, residual, out, segments, offsets, row_lengths, ks, values, indices, scratch);
}

EXPORT int tw_bank_topk(const float *grad, const float *residual, float *out, int64_t segments, const int64_t *offsets,
                        const int64_t *banks, int64_t k, float *values, int32_t *indices, const tw_scratch *scratch) {
    return active->bank_topk(grad, residual, out, segments, offsets, banks, k, values, indices, scratch);
}

EXPORT int tw_int8_encode(const float *grad, const float *residual, float *out, int64_t n, int64_t block,
                          int8_t *codes, float *scales) {
    return active->int8_encode(grad, residual, out, n, block, codes, scales);
}

EXPORT void tw_int8_decode(const int8_t *codes, const float *scales, int64_t n, int64_t block, float weight,
                           int accumulate, float *out) {
    active->int8_decode(codes, scales, n, block, weight, accumulate, out);
}

EXPORT int tw_int4_encode(const float *grad, const float *residual, float *out, int64_t n, int64_t block,
                          uint8_t *codes, uint16_t *scales) {
    return active->int4_encode(grad, residual, out, n, block, codes, scales);
}

EXPORT void tw_int4_decode(const uint8_t *codes, const uint16_t *scales, int64_t n, int64_t block, float weight,
                           int accumulate, float *out) {
    active->int4_decode(codes, scales, n, block, weight, accumulate, out);
}

EXPORT int tw_coarse_encode(int bits, const float *grad, const float *residual, float *out, int64_t n, int64_t block,
                            uint8_t *codes, uint16_t *scales) {
    return active->coarse_encode(bits, grad, residual, out, n, block, codes, scales);
}

EXPORT void tw_coarse_decode(int bits, const uint8_t *codes, const uint16_t *scales, int64_t n, int64_t block,
                             float weight, int accumulate, float *out) {
    active->coarse_decode(bits, codes, scales, n, block, weight, accumulate, out);
}

/* Rows of a message matrix: the codes of n values, then their scales. n is a whole number of blocks. */
static int64_t code_bytes(int bits, int64_t n) { return n * bits / 8; }

static int encode_row(int bits, const float *grad, const float *residual, float *out, int64_t n, int64_t block,
                      uint8_t *row) {
    void *scales = row + code_bytes(bits, n);
    if (bits == 8) return active->int8_encode(grad, residual, out, n, block, (int8_t *)row, scales);
    if (bits == 4) return active->int4_encode(grad, residual, out, n, block, row, scales);
    return active->coarse_encode(bits, grad, residual, out, n, block, row, scales);
}

EXPORT int tw_encode_rows(int bits, const float *grad, const float *residual, float *out, int64_t rows, int64_t n,
                          int64_t block, uint8_t *messages, int64_t stride) {
    int finite = 1;
    for (int64_t r = 0; r < rows; r++, grad += n, out += n, messages += stride) {
        const float *old = residual ? residual + r * n : NULL;
        finite &= encode_row(bits, grad, old, out, n, block, messages);
    }
    return finite;
}

/* n values of a row, from value number `first` of its `length` on. */
static void decode_part(int bits, const uint8_t *row, int64_t length, int64_t first, int64_t n, int64_t block,
                        float weight, int accumulate, float *out) {
    const uint8_t *codes = row + code_bytes(bits, first);
    const void *scales = row + code_bytes(bits, length);
    int64_t blocks = first / block;
    if (bits == 8)
        active->int8_decode((const int8_t *)codes, (const float *)scales + blocks, n, block, weight, accumulate, out);
    else if (bits == 4)
        active->int4_decode(codes, (const uint16_t *)scales + blocks, n, block, weight, accumulate, out);
    else
        active->coarse_decode(bits, codes, (const uint16_t *)scales + blocks, n, block, weight, accumulate, out);
}

EXPORT void tw_decode_rows(int bits, const uint8_t *messages, int64_t rows, int64_t stride, int64_t n, int64_t block,
                           float *out) {
    for (int64_t r = 0; r < rows; r++) decode_part(bits, messages + r * stride, n, 0, n, block, 1.0f, 0, out + r * n);
}

/* Piece by piece, so that the sum stays in the nearest cache until all rows are added. */
EXPORT void tw_sum_rows(int bits, const uint8_t *messages, int64_t rows, int64_t stride, int64_t n, int64_t block,
                        float weight, float *out) {
    const int64_t piece = block > SUMMED_ELEMS ? block : SUMMED_ELEMS / block * block;
    for (int64_t first = 0; first < n; first += piece) {
        int64_t count = n - first < piece ? n - first : piece;
        for (int64_t r = 0; r < rows; r++)
            decode_part(bits, messages + r * stride, n, first, count, block, weight, r > 0, out + first);
    }
}

EXPORT void tw_segment_amax(const float *x, int64_t segments, const int64_t *offsets, float *amax) {
    active->segment_amax(x, segments, offsets, amax);
}

EXPORT void tw_segment_moments(const float *x, int64_t segments, const int64_t *offsets, double *sums,
                               double *squares) {
    active->segment_moments(x, segments, offsets, sums, squares);
}

EXPORT int tw_all_finite(const float *x, int64_t n) {
    const int64_t offsets[2] = {0, n};
    float amax;
    active->segment_amax(x, 1, offsets, &amax);
    return amax <= 0x1.fffffep127f; /* neither infinity nor NaN is */
}

/* Returns -1, or the number of the first payload that has an index outside 0 .. numel - 1. */
EXPORT int64_t tw_scatter_mean(int64_t payloads, const float *const *values, const int32_t *const *indices,
                               const int64_t *counts, float weight, float *out, int64_t numel) {
    int64_t entries = 0;
    for (int64_t p = 0; p < payloads; p++) entries += counts[p];
    if (active->scatter_sorted(payloads, values, indices, counts, weight, out, numel) == entries) return -1;
    /* Some payload is not ascending: entry by entry, in the same order of additions. */
    memset(out, 0, sizeof(float) * (size_t)numel);
    for (int64_t p = 0; p < payloads; p++)
        for (int64_t j = 0; j < counts[p]; j++) {
            if (indices[p][j] < 0 || indices[p][j] >= numel) return p;
            out[indices[p][j]] += values[p][j] * weight;
        }
    return -1;
}

EXPORT void tw_count_ages(const float *mean, uint8_t *since, uint8_t *ages, int cap, int64_t n) {
    active->count_ages(mean, since, ages, cap, n);
}

EXPORT void tw_aged_adamw(float *weight, const float *grad, const uint8_t *ages, float *moment, float *square,
                          const float *table, float decay, float step_size, float correction, float epsilon,
                          int64_t n) {
    const tw_adamw rule = {table, decay, step_size, correction, epsilon};
    active->aged_adamw(weight, grad, ages, moment, square, &rule, n);
}
