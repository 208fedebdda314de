/* Template part: 1 and 2 bits per value under a scale that comes from the mean magnitude of the block.
 *
 * The upper bit of a code is the sign. 1 bit: the value is the scale. 2 bits: half the scale, or with the lower bit 1.5 of it.
 * `bits` is a constant wherever these functions are called, which leaves one branch of each `bits == 1`.
 *
 * The mean is a sum in 16 lanes, whatever the width of a vector, so that all processors round alike. Terms are divided before
 * they are added: the sum of finite values then cannot overflow. Multiples of a bf16 scale by 0.5 and 1.5 are exact.
 */

enum { COARSE_BLOCK = 64, LANES = 16 };

/* 2^127 is the largest scale: 1.5 times that is still finite. */
INLINE float mean_scale(float mean, int32_t peak, const int bits) {
    if (bits == 2) mean *= 1.25f;
    float scale = rounded_to_bf16(mean < 0x1p127f ? mean : 0x1p127f);
    return peak >= TW_INF_KEY || scale < 0x1p-126f ? 0.0f : scale;
}

INLINE int32_t coarse_whole(const float *grad, const float *residual, float *out, int64_t i, uint8_t *codes,
                            uint16_t *scales, int64_t block_at, const int bits) {
    const vf share = v_set1(1.0f / COARSE_BLOCK);
    vf sums[COARSE_BLOCK / W], lanes[LANES / W];
    vi largest = vi_set1(0);
    for (int lane = 0; lane < LANES / W; lane++) lanes[lane] = v_set1(0.0f);
    for (int v = 0; v < COARSE_BLOCK / W; v++) {
        sums[v] = v_sum_at(grad, residual, i + v * W);
        largest = vi_max(largest, v_magnitude(sums[v]));
        lanes[v % (LANES / W)] = v_add(lanes[v % (LANES / W)], v_mul(v_abs(sums[v]), share));
    }
    int32_t peak = horizontal_max(largest);
    float scale = mean_scale(fold_16(lanes), peak, bits);
    store_scale(scales, block_at, scale, peak, 4);
    if (peak >= TW_INF_KEY)
        for (int v = 0; v < COARSE_BLOCK / W; v++) sums[v] = v_set1(0.0f);
    const vf near = v_set1(bits == 1 ? scale : 0.5f * scale), far = v_set1(1.5f * scale);
    const vi limit = vi_set1(magnitude(scale));
    uint64_t negative = 0, nearer = 0;
    for (int v = 0; v < COARSE_BLOCK / W; v++) {
        vm is_near = vi_gt(limit, v_magnitude(sums[v]));
        vf level = bits == 1 ? near : v_blend(is_near, near, far);
        negative |= (uint64_t)v_sign_bits(sums[v]) << v * W;
        if (bits == 2) nearer |= (uint64_t)vm_bits(is_near) << v * W;
        v_store(out + i + v * W, v_sub(sums[v], v_signed_like(level, sums[v])));
    }
    const uint64_t farther = ~nearer;
    uint64_t pairs[2] = {at_even_bits((uint32_t)farther) | at_even_bits((uint32_t)negative) << 1,
                         at_even_bits((uint32_t)(farther >> 32)) | at_even_bits((uint32_t)(negative >> 32)) << 1};
    if (bits == 1) memcpy(codes + i / 8, &negative, sizeof negative);
    else memcpy(codes + i / 4, pairs, sizeof pairs);
    return peak;
}

/* A block of any length, one element at a time. Bits behind the last value are zero. */
INLINE int32_t coarse_any(const float *grad, const float *residual, float *out, int64_t start, int64_t stop,
                          uint8_t *codes, uint16_t *scales, int64_t block_at, const int bits) {
    const float share = 1.0f / (float)(stop - start);
    const int per_byte = 8 / bits;
    float lanes[LANES] = {0};
    int32_t peak = 0;
    for (int64_t i = start; i < stop; i++) {
        out[i] = sum_at(grad, residual, i);
        peak = magnitude(out[i]) > peak ? magnitude(out[i]) : peak;
        lanes[(i - start) % LANES] += fabsf(out[i]) * share;
    }
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    float scale = mean_scale(lanes[0], peak, bits);
    store_scale(scales, block_at, scale, peak, 4);
    for (int64_t i = start; i < stop; i++) {
        float sum = peak >= TW_INF_KEY ? 0.0f : out[i];
        int far = magnitude(sum) >= magnitude(scale), negative = signbit(sum) != 0;
        int code = bits == 1 ? negative : negative << 1 | far, shift = bits * (int)(i % per_byte);
        codes[i / per_byte] = (uint8_t)((shift ? codes[i / per_byte] : 0) | code << shift);
        out[i] = sum - copysignf(bits == 1 ? scale : far ? 1.5f * scale : 0.5f * scale, sum);
    }
    return peak;
}

INLINE int coarse_encode_bits(const float *grad, const float *residual, float *out, int64_t n, int64_t block,
                              uint8_t *codes, uint16_t *scales, const int bits) {
    int32_t largest = 0, peak;
    for (int64_t i = 0, at = 0; i < n; i += block, at++) {
        if (block == COARSE_BLOCK && i + block <= n)
            peak = coarse_whole(grad, residual, out, i, codes, scales, at, bits);
        else
            peak = coarse_any(grad, residual, out, i, least(i + block, n), codes, scales, at, bits);
        largest = peak > largest ? peak : largest;
    }
    return largest < TW_INF_KEY;
}

static const float LEVELS[3][LANES] = {
    {0},
    {1.0f, -1.0f, 1.0f, -1.0f, 1.0f, -1.0f, 1.0f, -1.0f, 1.0f, -1.0f, 1.0f, -1.0f, 1.0f, -1.0f, 1.0f, -1.0f},
    {0.5f, 1.5f, -0.5f, -1.5f, 0.5f, 1.5f, -0.5f, -1.5f, 0.5f, 1.5f, -0.5f, -1.5f, 0.5f, 1.5f, -0.5f, -1.5f},
};

/* What a block can hold is worked out once: decoding is a look-up. */
INLINE void coarse_decode_bits(const uint8_t *codes, const uint16_t *scales, int64_t n, int64_t block, float weight,
                               int accumulate, float *out, const int bits) {
    for (int64_t i = 0, at = 0; i < n; at++) {
        int64_t stop = least(i + block, n);
        float scale = from_bits((uint32_t)scales[at] << 16);
        const vf table = v_mul(v_mul(v_load(LEVELS[bits]), v_set1(scale)), v_set1(weight));
        const vf positive = v_set1(scale * weight);
        for (; i + W <= stop; i += W) {
            vf x = bits == 1 ? v_load_int1(codes, i, positive) : v_load_int2(codes + i / 4, table);
            v_store(out + i, accumulate ? v_add(v_load(out + i), x) : x);
        }
        for (; i < stop; i++) {
            int code = codes[i * bits / 8] >> bits * (i % (8 / bits)) & ((1 << bits) - 1);
            float x = LEVELS[bits][code] * scale * weight;
            out[i] = accumulate ? out[i] + x : x;
        }
    }
}

static int coarse_encode(int bits, const float *grad, const float *residual, float *out, int64_t n, int64_t block,
                         uint8_t *codes, uint16_t *scales) {
    return bits == 1 ? coarse_encode_bits(grad, residual, out, n, block, codes, scales, 1)
                     : coarse_encode_bits(grad, residual, out, n, block, codes, scales, 2);
}

static void coarse_decode(int bits, const uint8_t *codes, const uint16_t *scales, int64_t n, int64_t block,
                          float weight, int accumulate, float *out) {
    if (bits == 1) coarse_decode_bits(codes, scales, n, block, weight, accumulate, out, 1);
    else coarse_decode_bits(codes, scales, n, block, weight, accumulate, out, 2);
}
