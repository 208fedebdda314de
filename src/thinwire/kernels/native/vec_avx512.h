/* Vectors of 16 for the kernel templates, on AVX-512. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define W 16
typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

static inline vf v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
static inline void v_stream(float *p, vf x) { _mm512_stream_ps(p, x); }
static inline void v_fence(void) { _mm_sfence(); }
static inline vf v_set1(float x) { return _mm512_set1_ps(x); }
static inline vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf v_sqrt(vf x) { return _mm512_sqrt_ps(x); }
static inline vf v_clamp(vf x, vf low, vf high) { return _mm512_min_ps(_mm512_max_ps(x, low), high); }
static inline vf v_rint(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

static inline vi vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }
static inline void vi_store(int32_t *p, vi x) { _mm512_storeu_si512(p, x); }
static inline vi vi_load_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline vf v_gather(const float *table, vi at) { return _mm512_i32gather_ps(at, table, 4); }
static inline vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline vi vi_iota(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
static inline vi vi_min(vi a, vi b) { return _mm512_min_epi32(a, b); }
static inline int32_t horizontal_max(vi x) { return _mm512_reduce_max_epi32(x); }
static inline vi v_magnitude(vf x) { return _mm512_and_si512(_mm512_castps_si512(x), vi_set1(0x7FFFFFFF)); }
static inline vi vi_blend(vm m, vi yes, vi no) { return _mm512_mask_blend_epi32(m, no, yes); }
static inline vf v_blend(vm m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
static inline vm vi_gt(vi a, vi b) { return _mm512_cmpgt_epi32_mask(a, b); }
static inline vm v_exceeds(vi magnitude, vf limit) {
    return _mm512_cmp_ps_mask(_mm512_castsi512_ps(magnitude), limit, _CMP_GT_OQ);
}
static inline unsigned vm_bits(vm m) { return m; }
static inline vf v_zero_where(vm m, vf x) { return _mm512_maskz_mov_ps((vm)~m, x); }

/* Compressing in a register and storing all of it: compress-to-memory is microcoded on some AVX-512 processors. */
static inline void v_compress(float *p, vm m, vf x) { _mm512_storeu_ps(p, _mm512_maskz_compress_ps(m, x)); }
static inline void vi_compress(int32_t *p, vm m, vi x) { _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(m, x)); }

static inline vf v_abs(vf x) { return _mm512_castsi512_ps(v_magnitude(x)); }
static inline vf v_signed_like(vf magnitude, vf x) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(x, _mm512_castsi512_ps(vi_set1(INT32_MIN))));
}
static inline unsigned v_sign_bits(vf x) { return _mm512_movepi32_mask(_mm512_castps_si512(x)); }
/* The sum of 16 lanes, each taking the one 8, then 4, 2 and 1 further on. */
static inline float fold_16(const vf *lanes) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes[0]), _mm512_extractf32x8_ps(lanes[0], 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline uint64_t at_even_bits(uint32_t bits) { return _pdep_u64(bits, 0x5555555555555555ull); }
/* `table` has its four values once in every quarter: an index reads only its lowest two bits. */
static inline vf v_load_int2(const uint8_t *p, vf table) {
    int32_t codes;
    memcpy(&codes, p, sizeof codes);
    return _mm512_permutevar_ps(table, _mm512_srlv_epi32(vi_set1(codes), _mm512_slli_epi32(vi_iota(), 1)));
}
static inline vf v_load_int1(const uint8_t *codes, int64_t i, vf positive) {
    vm negative;
    memcpy(&negative, codes + i / 8, sizeof negative);
    return _mm512_mask_xor_ps(positive, negative, positive, _mm512_castsi512_ps(vi_set1(INT32_MIN)));
}

static inline void v_store_int8(int8_t *p, vf x) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
static inline vf v_load_int8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* Nibbles hold code + 8: a pair of 32-bit lanes is one 64-bit lane whose upper half moves down beside the lower. */
static inline void v_store_int4(uint8_t *p, vf x) {
    __m512i nibbles = _mm512_add_epi32(_mm512_cvtps_epi32(x), vi_set1(8));
    __m512i pairs = _mm512_or_si512(nibbles, _mm512_srli_epi64(nibbles, 28));
    _mm_storel_epi64((__m128i *)p, _mm512_cvtepi64_epi8(pairs));
}
static inline vf v_load_int4(const uint8_t *p) {
    __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)p));
    __m512i pairs = _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28)), vi_set1(15));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(pairs, vi_set1(8)));
}
