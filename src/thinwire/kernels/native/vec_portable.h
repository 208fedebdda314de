/* Vectors of 4 for the kernel templates, in the vector types of GCC and Clang: SSE2, NEON or whatever is there.
 *
 * Wider ones would be taken apart element by element on processors that lack them.
 */
#include <stdint.h>
#include <string.h>

#define W 4
#define EACH for (int lane = 0; lane < W; lane++)
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef vi vm; /* -1 or 0 */
typedef int8_t v_int8 __attribute__((vector_size(W)));

static inline vf v_load(const float *p) { vf x; memcpy(&x, p, sizeof x); return x; }
static inline void v_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
static inline void v_stream(float *p, vf x) { v_store(p, x); }
static inline void v_fence(void) {}
static inline vf v_set1(float s) { return (vf){s, s, s, s}; }
static inline vf v_add(vf a, vf b) { return a + b; }
static inline vf v_sub(vf a, vf b) { return a - b; }
static inline vf v_mul(vf a, vf b) { return a * b; }

static inline vf v_div(vf a, vf b) { return a / b; }
static inline vf v_sqrt(vf x) {
    EACH x[lane] = __builtin_sqrtf(x[lane]);
    return x;
}

static inline vi vi_load(const int32_t *p) { vi x; memcpy(&x, p, sizeof x); return x; }
static inline void vi_store(int32_t *p, vi x) { memcpy(p, &x, sizeof x); }
static inline vi vi_load_u8(const uint8_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }
static inline vf v_gather(const float *table, vi at) {
    return (vf){table[at[0]], table[at[1]], table[at[2]], table[at[3]]};
}
static inline vi vi_set1(int32_t s) { return (vi){s, s, s, s}; }
static inline vi vi_iota(void) { return (vi){0, 1, 2, 3}; }
static inline vi vi_add(vi a, vi b) { return a + b; }
static inline vi vi_blend(vm m, vi yes, vi no) { return (yes & m) | (no & ~m); }
static inline vf v_blend(vm m, vf yes, vf no) { return (vf)vi_blend(m, (vi)yes, (vi)no); }
static inline vm vi_gt(vi a, vi b) { return a > b; }
static inline vi vi_max(vi a, vi b) { return vi_blend(a > b, a, b); }
static inline vi vi_min(vi a, vi b) { return vi_blend(a > b, b, a); }
static inline int32_t horizontal_max(vi x) {
    int32_t best = x[0];
    EACH best = x[lane] > best ? x[lane] : best;
    return best;
}
static inline vi v_magnitude(vf x) { return (vi)x & 0x7FFFFFFF; }
static inline vm v_exceeds(vi magnitude, vf limit) { return (vf)magnitude > limit; }
static inline unsigned vm_bits(vm m) {
    uint64_t halves[W / 2], all;
    m &= (vi){1, 2, 4, 8};
    memcpy(halves, &m, sizeof halves);
    all = halves[0] | halves[1];
    return (unsigned)(all | all >> 32) & 15;
}
static inline vf v_zero_where(vm m, vf x) { return (vf)((vi)x & ~m); }

static inline vf v_clamp(vf x, vf low, vf high) {
    x = (vf)vi_blend(x < low, (vi)low, (vi)x);
    return (vf)vi_blend(x > high, (vi)high, (vi)x);
}
/* Nearest even for magnitudes below 2^22, which codes are: adding 1.5 * 2^23 leaves no room for a fraction. */
static inline vf v_rint(vf x) {
    const vf big = v_set1(0x1.8p23f);
    vf rounded = x + big - big;
    return (vf)((vi)rounded | ((vi)x & INT32_MIN)); /* -0.3 rounds to -0 */
}

static inline void v_compress(float *p, vm m, vf x) { EACH { *p = x[lane]; p -= m[lane]; } }
static inline void vi_compress(int32_t *p, vm m, vi x) { EACH { *p = x[lane]; p -= m[lane]; } }

static inline vf v_abs(vf x) { return (vf)v_magnitude(x); }
static inline vf v_signed_like(vf magnitude, vf x) { return (vf)((vi)magnitude | ((vi)x & INT32_MIN)); }
static inline unsigned v_sign_bits(vf x) { return vm_bits((vi)x >> 31); }
/* The sum of 16 lanes, each taking the one 8, then 4, 2 and 1 further on. */
static inline float fold_16(const vf *lanes) {
    vf four = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
static inline uint64_t at_even_bits(uint32_t bits) {
    uint64_t x = bits;
    x = (x | x << 16) & 0x0000FFFF0000FFFFull;
    x = (x | x << 8) & 0x00FF00FF00FF00FFull;
    x = (x | x << 4) & 0x0F0F0F0F0F0F0F0Full;
    x = (x | x << 2) & 0x3333333333333333ull;
    return (x | x << 1) & 0x5555555555555555ull;
}
static inline vf v_load_int2(const uint8_t *p, vf table) {
    return (vf){table[*p & 3], table[*p >> 2 & 3], table[*p >> 4 & 3], table[*p >> 6]};
}
/* A vector is half a byte here. */
static inline vf v_load_int1(const uint8_t *codes, int64_t i, vf positive) {
    const vi one_bit_each = {1, 2, 4, 8};
    vi negative = (vi_set1(codes[i / 8] >> i % 8) & one_bit_each) == one_bit_each;
    return (vf)((vi)positive ^ (negative & INT32_MIN));
}

static inline void v_store_int8(int8_t *p, vf x) {
    v_int8 codes = __builtin_convertvector(__builtin_convertvector(x, vi), v_int8);
    memcpy(p, &codes, sizeof codes);
}
static inline vf v_load_int8(const int8_t *p) {
    v_int8 codes;
    memcpy(&codes, p, sizeof codes);
    return __builtin_convertvector(__builtin_convertvector(codes, vi), vf);
}
static inline void v_store_int4(uint8_t *p, vf x) {
    vi nibbles = __builtin_convertvector(x, vi) + 8;
    for (int pair = 0; pair < W / 2; pair++) p[pair] = (uint8_t)(nibbles[2 * pair] | nibbles[2 * pair + 1] << 4);
}
static inline vf v_load_int4(const uint8_t *p) {
    vi pairs = {p[0], p[0] >> 4, p[1], p[1] >> 4};
    return __builtin_convertvector((pairs & 15) - 8, vf);
}
