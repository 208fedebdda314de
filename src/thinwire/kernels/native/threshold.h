/* Template part: compensate, and compensate + select by threshold + pack, each one pass over memory. */

static int compensate(const float *grad, const float *residual, float decay, float *velocity, float momentum,
                      float *out, int64_t n) {
    const vf decays = v_set1(decay), momenta = v_set1(momentum);
    vi largest = vi_set1(0);
    int32_t tail_largest = 0;
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        vf fresh = v_load(grad + i);
        if (velocity) {
            fresh = v_add(v_mul(v_load(velocity + i), momenta), fresh);
            v_store(velocity + i, fresh);
        }
        if (residual) fresh = v_add(v_mul(v_load(residual + i), decays), fresh);
        v_store(out + i, fresh);
        largest = vi_max(largest, v_magnitude(fresh));
    }
    for (; i < n; i++) {
        float fresh = grad[i];
        if (velocity) fresh = velocity[i] = velocity[i] * momentum + fresh;
        if (residual) fresh = residual[i] * decay + fresh;
        out[i] = fresh;
        if (magnitude(fresh) > tail_largest) tail_largest = magnitude(fresh);
    }
    return horizontal_max(largest) < TW_INF_KEY && tail_largest < TW_INF_KEY;
}

/* One segment; returns the number of entries written. */
static int64_t pack_segment(const float *grad, const float *residual, float *out, int64_t start, int64_t stop,
                            float limit, float *values, int32_t *indices, int32_t *largest_seen) {
    const vf limits = v_set1(limit);
    vi largest = vi_set1(0);
    int64_t count = 0, i = start;
    for (; i + W <= stop; i += W) {
        vf sum = v_sum_at(grad, residual, i);
        vi key = v_magnitude(sum);
        vm chosen = v_exceeds(key, limits);
        unsigned bits = vm_bits(chosen);
        largest = vi_max(largest, key);
        v_store(out + i, v_zero_where(chosen, sum));
        if (bits) {
            v_compress(values + count, chosen, sum);
            vi_compress(indices + count, chosen, vi_add(vi_set1((int32_t)i), vi_iota()));
            count += __builtin_popcount(bits);
        }
    }
    int32_t peak = horizontal_max(largest);
    for (; i < stop; i++) {
        float sum = sum_at(grad, residual, i);
        int chosen = fabsf(sum) > limit;
        if (magnitude(sum) > peak) peak = magnitude(sum);
        values[count] = sum;
        indices[count] = (int32_t)i;
        count += chosen;
        out[i] = chosen ? 0.0f : sum;
    }
    if (peak > *largest_seen) *largest_seen = peak;
    return count;
}

static int threshold_pack(const float *grad, const float *residual, float *out, int64_t segments,
                          const int64_t *offsets, const float *thresholds, float *values, int32_t *indices,
                          int64_t *counts) {
    int32_t largest = 0;
    for (int64_t s = 0; s < segments; s++) {
        counts[s] = pack_segment(grad, residual, out, offsets[s], offsets[s + 1], thresholds[s], values, indices,
                                 &largest);
        values += counts[s];
        indices += counts[s];
    }
    return largest < TW_INF_KEY;
}
