/* Template part: block-scaled int8 and int4. A block is a multiple of 16, so only the end of a buffer is scalar.
 *
 * `bits` is 8 or 4 and a constant wherever these functions are called, which leaves one branch of each `bits == 8`.
 */

#define INLINE static inline __attribute__((always_inline))

enum { MAX_BLOCK_VECTORS = 256 / W };

INLINE float code_limit(const int bits) { return bits == 8 ? 127.0f : 7.0f; }

/* Nearest even; x is finite and far from overflow. */
INLINE float rounded_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return from_bits((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u);
}

/* Scale of a block from the bits of its largest magnitude; 0 when all codes are to be 0. */
INLINE float scale_of(int32_t peak, const int bits) {
    float scale = from_bits((uint32_t)peak) / code_limit(bits);
    if (bits == 4) scale = rounded_to_bf16(scale);
    return peak >= TW_INF_KEY || scale < 0x1p-126f ? 0.0f : scale;
}

/* A block that is not finite has a NaN scale, whatever its codes. */
INLINE void store_scale(void *scales, int64_t at, float scale, int32_t peak, const int bits) {
    uint32_t pattern;
    memcpy(&pattern, &scale, sizeof pattern);
    if (peak >= TW_INF_KEY) pattern = 0x7FC00000;
    if (bits == 8) ((uint32_t *)scales)[at] = pattern;
    else ((uint16_t *)scales)[at] = (uint16_t)(pattern >> 16);
}

INLINE void store_codes(void *codes, int64_t i, vf code, const int bits) {
    if (bits == 8) v_store_int8((int8_t *)codes + i, code);
    else v_store_int4((uint8_t *)codes + i / 2, code);
}

/* An even position also fills the upper nibble of its byte with code 0, in case it is the last. */
INLINE void store_code(void *codes, int64_t i, float code, const int bits) {
    uint8_t *pair = (uint8_t *)codes + i / 2, nibble = (uint8_t)((int)code + 8);
    if (bits == 8) ((int8_t *)codes)[i] = (int8_t)code;
    else *pair = (uint8_t)(i % 2 ? (*pair & 15) | nibble << 4 : nibble | 8 << 4);
}

/* A whole block that fits into registers. */
INLINE int32_t encode_whole(const float *grad, const float *residual, float *out, int64_t i, const int vectors,
                            void *codes, void *scales, int64_t block_at, const int bits) {
    const vf low = v_set1(-code_limit(bits)), high = v_set1(code_limit(bits));
    vf sums[MAX_BLOCK_VECTORS];
    vi largest = vi_set1(0);
    for (int v = 0; v < vectors; v++) {
        sums[v] = v_sum_at(grad, residual, i + v * W);
        largest = vi_max(largest, v_magnitude(sums[v]));
    }
    int32_t peak = horizontal_max(largest);
    float scale = scale_of(peak, bits);
    store_scale(scales, block_at, scale, peak, bits);
    const vf steps = v_set1(scale), inverses = v_set1(scale > 0.0f ? 1.0f / scale : 0.0f);
    if (peak >= TW_INF_KEY)
        for (int v = 0; v < vectors; v++) sums[v] = v_set1(0.0f);
    for (int v = 0; v < vectors; v++) {
        vf code = v_clamp(v_rint(v_mul(sums[v], inverses)), low, high);
        store_codes(codes, i + v * W, code, bits);
        v_store(out + i + v * W, v_sub(sums[v], v_mul(code, steps)));
    }
    return peak;
}

/* A block of any length, one element at a time. */
INLINE int32_t encode_any(const float *grad, const float *residual, float *out, int64_t start, int64_t stop,
                          void *codes, void *scales, int64_t block_at, const int bits) {
    const float limit = code_limit(bits);
    int32_t peak = 0;
    for (int64_t i = start; i < stop; i++) {
        out[i] = sum_at(grad, residual, i);
        peak = magnitude(out[i]) > peak ? magnitude(out[i]) : peak;
    }
    float scale = scale_of(peak, bits), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    store_scale(scales, block_at, scale, peak, bits);
    for (int64_t i = start; i < stop; i++) {
        float sum = peak >= TW_INF_KEY ? 0.0f : out[i], code = rintf(sum * inverse);
        code = code < -limit ? -limit : code > limit ? limit : code;
        store_code(codes, i, code, bits);
        out[i] = sum - code * scale;
    }
    return peak;
}

INLINE int encode(const float *grad, const float *residual, float *out, int64_t n, int64_t block, void *codes,
                  void *scales, const int usual_block, const int bits) {
    int32_t largest = 0, peak;
    for (int64_t i = 0, at = 0; i < n; i += block, at++) {
        if (block == usual_block && i + block <= n)
            peak = encode_whole(grad, residual, out, i, usual_block / W, codes, scales, at, bits);
        else
            peak = encode_any(grad, residual, out, i, least(i + block, n), codes, scales, at, bits);
        largest = peak > largest ? peak : largest;
    }
    return largest < TW_INF_KEY;
}

INLINE void decode(const void *codes, const void *scales, int64_t n, int64_t block, float weight, int accumulate,
                   float *out, const int bits) {
    const vf weights = v_set1(weight);
    for (int64_t i = 0, at = 0; i < n; at++) {
        int64_t stop = least(i + block, n);
        float scale = bits == 8 ? ((const float *)scales)[at] : from_bits((uint32_t)((const uint16_t *)scales)[at] << 16);
        const vf steps = v_set1(scale);
        for (; i + W <= stop; i += W) {
            vf code = bits == 8 ? v_load_int8((const int8_t *)codes + i) : v_load_int4((const uint8_t *)codes + i / 2);
            vf x = v_mul(v_mul(code, steps), weights);
            v_store(out + i, accumulate ? v_add(v_load(out + i), x) : x);
        }
        for (; i < stop; i++) {
            int nibble = ((const uint8_t *)codes)[bits == 8 ? 0 : i / 2] >> 4 * (i % 2) & 15;
            float code = bits == 8 ? ((const int8_t *)codes)[i] : (float)(nibble - 8), x = code * scale * weight;
            out[i] = accumulate ? out[i] + x : x;
        }
    }
}

static int int8_encode(const float *grad, const float *residual, float *out, int64_t n, int64_t block, int8_t *codes,
                       float *scales) {
    return encode(grad, residual, out, n, block, codes, scales, 256, 8);
}

static void int8_decode(const int8_t *codes, const float *scales, int64_t n, int64_t block, float weight,
                        int accumulate, float *out) {
    decode(codes, scales, n, block, weight, accumulate, out, 8);
}

static int int4_encode(const float *grad, const float *residual, float *out, int64_t n, int64_t block, uint8_t *codes,
                       uint16_t *scales) {
    return encode(grad, residual, out, n, block, codes, scales, 64, 4);
}

static void int4_decode(const uint8_t *codes, const uint16_t *scales, int64_t n, int64_t block, float weight,
                        int accumulate, float *out) {
    decode(codes, scales, n, block, weight, accumulate, out, 4);
}
