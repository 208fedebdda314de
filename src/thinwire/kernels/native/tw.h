/* What all files of the native library share: the table of kernels that each instruction set fills in.
 *
 * Buffers are flat fp32. `residual` may be NULL. `out` receives the new residual and may equal `grad` or `residual`,
 * so no pointer here is `restrict`. Semantics are defined by thinwire/kernels/reference.py, bit for bit.
 */
#ifndef TW_H
#define TW_H

#include <stdint.h>

#define TW_INF_KEY 0x7F800000 /* magnitude bits of infinity; anything larger is a NaN */
#define TW_NAN_KEY 0x7F800001 /* all NaNs share this key, so that their payload decides nothing */
#define TW_COPY_BANKS 16      /* banks copied together when k is too large for registers */
#define TW_PAD 16             /* elements that vector stores may write past the end of a scratch buffer */

/* Memory for one group (row, bank or segment) of n elements: n + TW_PAD entries each. */
typedef struct {
    float *values;
    int32_t *indices;
    int32_t *keys;
    float *columns; /* TW_COPY_BANKS banks of n entries; only for bank_topk */
} tw_scratch;

#define TW_AGE_COLUMNS 5 /* what one row of an age table holds, see thinwire/kernels/reference_ages.py */

/* One AdamW step for coordinates of any age. */
typedef struct {
    const float *table; /* 256 rows, one per age */
    float decay;        /* factor of every weight: 1 - lr * weight_decay */
    float step_size;    /* lr / (1 - beta1^t) */
    float correction;   /* 1 / sqrt(1 - beta2^t) */
    float epsilon;
} tw_adamw;

typedef struct {
    int (*compensate)(const float *grad, const float *residual, float decay, float *velocity, float momentum,
                      float *out, int64_t n);
    int (*threshold_pack)(const float *grad, const float *residual, float *out, int64_t segments,
                          const int64_t *offsets, const float *thresholds, float *values, int32_t *indices,
                          int64_t *counts);
    int (*row_topk)(const float *grad, const float *residual, float *out, int64_t segments, const int64_t *offsets,
                    const int64_t *row_lengths, const int64_t *ks, float *values, int32_t *indices,
                    const tw_scratch *scratch);
    int (*bank_topk)(const float *grad, const float *residual, float *out, int64_t segments, const int64_t *offsets,
                     const int64_t *banks, int64_t k, float *values, int32_t *indices, const tw_scratch *scratch);
    int (*int8_encode)(const float *grad, const float *residual, float *out, int64_t n, int64_t block, int8_t *codes,
                       float *scales);
    void (*int8_decode)(const int8_t *codes, const float *scales, int64_t n, int64_t block, float weight,
                        int accumulate, float *out);
    int (*int4_encode)(const float *grad, const float *residual, float *out, int64_t n, int64_t block, uint8_t *codes,
                       uint16_t *scales);
    void (*int4_decode)(const uint8_t *codes, const uint16_t *scales, int64_t n, int64_t block, float weight,
                        int accumulate, float *out);
    int (*coarse_encode)(int bits, const float *grad, const float *residual, float *out, int64_t n, int64_t block,
                         uint8_t *codes, uint16_t *scales);
    void (*coarse_decode)(int bits, const uint8_t *codes, const uint16_t *scales, int64_t n, int64_t block,
                          float weight, int accumulate, float *out);
    void (*segment_amax)(const float *x, int64_t segments, const int64_t *offsets, float *amax);
    void (*segment_moments)(const float *x, int64_t segments, const int64_t *offsets, double *sums, double *squares);
    int64_t (*scatter_sorted)(int64_t payloads, const float *const *values, const int32_t *const *indices,
                              const int64_t *counts, float weight, float *out, int64_t numel);
    void (*count_ages)(const float *mean, uint8_t *since, uint8_t *ages, int cap, int64_t n);
    void (*aged_adamw)(float *weight, const float *grad, const uint8_t *ages, float *moment, float *square,
                       const tw_adamw *rule, int64_t n);
} tw_kernels;

extern const tw_kernels tw_portable;
#if defined(__x86_64__)
extern const tw_kernels tw_avx2;
extern const tw_kernels tw_avx512;
#endif

#endif
