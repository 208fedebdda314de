/* Template part: largest magnitude and moments per segment. */

enum { MOMENT_LANES = 16 };

static void segment_amax(const float *x, int64_t segments, const int64_t *offsets, float *amax) {
    for (int64_t s = 0; s < segments; s++) {
        vi largest = vi_set1(0);
        int64_t i = offsets[s];
        for (; i + W <= offsets[s + 1]; i += W) largest = vi_max(largest, v_magnitude(v_load(x + i)));
        int32_t peak = horizontal_max(largest);
        for (; i < offsets[s + 1]; i++)
            if (magnitude(x[i]) > peak) peak = magnitude(x[i]);
        amax[s] = from_bits(peak > TW_INF_KEY ? 0x7FC00000 : (uint32_t)peak);
    }
}

static double fold_lanes(double *lanes) {
    for (int half = MOMENT_LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static void segment_moments(const float *x, int64_t segments, const int64_t *offsets, double *sums, double *squares) {
    for (int64_t s = 0; s < segments; s++) {
        double sum[MOMENT_LANES] = {0}, square[MOMENT_LANES] = {0};
        int64_t i = offsets[s], stop = offsets[s + 1];
        for (; i + MOMENT_LANES <= stop; i += MOMENT_LANES)
            for (int lane = 0; lane < MOMENT_LANES; lane++) {
                double value = x[i + lane];
                sum[lane] += value;
                square[lane] += value * value;
            }
        for (int lane = 0; i < stop; i++, lane++) {
            double value = x[i];
            sum[lane] += value;
            square[lane] += value * value;
        }
        sums[s] = fold_lanes(sum);
        squares[s] = fold_lanes(square);
    }
}
