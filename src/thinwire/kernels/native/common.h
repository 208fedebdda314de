/* Template part: helpers for every kernel. Included after a vec_*.h, once per instruction set. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "tw.h"

static inline int32_t magnitude(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7FFFFFFF;
}

static inline int32_t key_of(float x) {
    int32_t key = magnitude(x);
    return key < TW_NAN_KEY ? key : TW_NAN_KEY;
}

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline vi v_key(vf x) { return vi_min(v_magnitude(x), vi_set1(TW_NAN_KEY)); }

static inline vf v_sum_at(const float *grad, const float *residual, int64_t i) {
    return residual ? v_add(v_load(residual + i), v_load(grad + i)) : v_load(grad + i);
}

static inline float sum_at(const float *grad, const float *residual, int64_t i) {
    return residual ? residual[i] + grad[i] : grad[i];
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
