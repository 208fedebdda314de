/* Vectors of 8 for the kernel templates, on AVX2. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define W 8
typedef __m256 vf;
typedef __m256i vi;
typedef __m256i vm;

static inline vf v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
static inline void v_stream(float *p, vf x) { _mm256_stream_ps(p, x); }
static inline void v_fence(void) { _mm_sfence(); }
static inline vf v_set1(float x) { return _mm256_set1_ps(x); }
static inline vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf v_sqrt(vf x) { return _mm256_sqrt_ps(x); }
static inline vf v_clamp(vf x, vf low, vf high) { return _mm256_min_ps(_mm256_max_ps(x, low), high); }
static inline vf v_rint(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

static inline vi vi_load(const int32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline void vi_store(int32_t *p, vi x) { _mm256_storeu_si256((__m256i *)p, x); }
static inline vi vi_load_u8(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline vf v_gather(const float *table, vi at) { return _mm256_i32gather_ps(table, at, 4); }
static inline vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
static inline vi vi_iota(void) { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
static inline vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline vi vi_max(vi a, vi b) { return _mm256_max_epi32(a, b); }
static inline vi vi_min(vi a, vi b) { return _mm256_min_epi32(a, b); }
static inline int32_t horizontal_max(vi x) {
    __m128i best = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    best = _mm_max_epi32(best, _mm_shuffle_epi32(best, 0x4E));
    best = _mm_max_epi32(best, _mm_shuffle_epi32(best, 0xB1));
    return _mm_cvtsi128_si32(best);
}
static inline vi v_magnitude(vf x) { return _mm256_and_si256(_mm256_castps_si256(x), vi_set1(0x7FFFFFFF)); }
static inline vi vi_blend(vm m, vi yes, vi no) { return _mm256_blendv_epi8(no, yes, m); }
static inline vf v_blend(vm m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(m)); }
static inline vm vi_gt(vi a, vi b) { return _mm256_cmpgt_epi32(a, b); }
static inline vm v_exceeds(vi magnitude, vf limit) {
    return _mm256_castps_si256(_mm256_cmp_ps(_mm256_castsi256_ps(magnitude), limit, _CMP_GT_OQ));
}
static inline unsigned vm_bits(vm m) { return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(m)); }
static inline vf v_zero_where(vm m, vf x) { return _mm256_andnot_ps(_mm256_castsi256_ps(m), x); }

/* The lanes to keep as 3-bit numbers, moved together by pext: a permutation without a lookup table. */
static inline vi vm_packing(vm m) {
    uint64_t spread = _pdep_u64(vm_bits(m), 0x0101010101010101ull) * 0xFF;
    uint64_t lanes = _pext_u64(0x0706050403020100ull, spread);
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)lanes));
}
static inline void v_compress(float *p, vm m, vf x) {
    _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(x, vm_packing(m)));
}
static inline void vi_compress(int32_t *p, vm m, vi x) {
    _mm256_storeu_si256((__m256i *)p, _mm256_permutevar8x32_epi32(x, vm_packing(m)));
}

static inline vf v_abs(vf x) { return _mm256_castsi256_ps(v_magnitude(x)); }
static inline vf v_signed_like(vf magnitude, vf x) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(x, _mm256_castsi256_ps(vi_set1(INT32_MIN))));
}
static inline unsigned v_sign_bits(vf x) { return (unsigned)_mm256_movemask_ps(x); }
/* The sum of 16 lanes, each taking the one 8, then 4, 2 and 1 further on. */
static inline float fold_16(const vf *lanes) {
    vf eight = v_add(lanes[0], lanes[1]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline uint64_t at_even_bits(uint32_t bits) { return _pdep_u64(bits, 0x5555555555555555ull); }
/* `table` has its four values once in every quarter: an index reads only its lowest two bits. */
static inline vf v_load_int2(const uint8_t *p, vf table) {
    uint16_t codes;
    memcpy(&codes, p, sizeof codes);
    return _mm256_permutevar_ps(table, _mm256_srlv_epi32(vi_set1(codes), _mm256_slli_epi32(vi_iota(), 1)));
}
static inline vf v_load_int1(const uint8_t *codes, int64_t i, vf positive) {
    vi signs = _mm256_sllv_epi32(vi_set1(codes[i / 8]), _mm256_sub_epi32(vi_set1(31), vi_iota()));
    return _mm256_xor_ps(positive, _mm256_castsi256_ps(_mm256_and_si256(signs, vi_set1(INT32_MIN))));
}

static inline void v_store_int8(int8_t *p, vf x) {
    __m256i codes = _mm256_cvtps_epi32(x);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}
static inline vf v_load_int8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
/* Nibbles hold code + 8: a pair of bytes is one 16-bit word whose upper byte moves down beside the lower. */
static inline void v_store_int4(uint8_t *p, vf x) {
    __m256i nibbles = _mm256_add_epi32(_mm256_cvtps_epi32(x), vi_set1(8));
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(nibbles), _mm256_extracti128_si256(nibbles, 1));
    __m128i pairs = _mm_packus_epi16(words, words);
    pairs = _mm_and_si128(_mm_or_si128(pairs, _mm_srli_epi16(pairs, 4)), _mm_set1_epi16(0xFF));
    _mm_storeu_si32(p, _mm_packus_epi16(pairs, pairs));
}
static inline vf v_load_int4(const uint8_t *p) {
    __m256i bytes = _mm256_cvtepu8_epi64(_mm_loadu_si32(p));
    __m256i pairs = _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi64(bytes, 28)), vi_set1(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(pairs, vi_set1(8)));
}
