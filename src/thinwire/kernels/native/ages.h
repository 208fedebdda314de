/* Template part: how old each received coordinate is, and the optimizer step that knows it. */

/* `since` counts steps since the last receipt up to `cap`; `ages` says how old what came now is, 0 where nothing came. */
static void count_ages(const float *mean, uint8_t *restrict since, uint8_t *restrict ages, int cap, int64_t n) {
    const uint8_t last = (uint8_t)cap;
    for (int64_t i = 0; i < n; i++) {
        uint8_t age = since[i] < last ? (uint8_t)(since[i] + 1) : last;
        uint8_t came = (uint8_t)-(mean[i] != 0.0f);
        ages[i] = age & came;
        since[i] = age & (uint8_t)~came;
    }
}

static void adamw_one(float *weight, float grad, int age, float *moment, float *square, const tw_adamw *rule) {
    const float *row = rule->table + TW_AGE_COLUMNS * age;
    *moment = *moment * row[0] + grad * row[1];
    *square = *square * row[2] + grad * grad * row[3];
    float size = sqrtf(*square) * rule->correction + rule->epsilon;
    *weight = *weight - *moment * (row[4] * rule->step_size) / size;
}

/* A vector of coordinates, of which those with an age above 0 were received; weights have their decay already. */
static void adamw_vector(float *weight, const float *grad, vi age, float *moment, float *square,
                         const tw_adamw *rule) {
    const float *table = rule->table;
    const vi row = vi_add(vi_add(age, age), vi_add(vi_add(age, age), age)); /* age * TW_AGE_COLUMNS */
    const vm came = vi_gt(age, vi_set1(0));
    const vf fresh = v_load(grad), old = v_load(weight), old_moment = v_load(moment), old_square = v_load(square);
    vf m = v_add(v_mul(old_moment, v_gather(table, row)), v_mul(fresh, v_gather(table + 1, row)));
    vf v = v_add(v_mul(old_square, v_gather(table + 2, row)), v_mul(v_mul(fresh, fresh), v_gather(table + 3, row)));
    vf size = v_add(v_mul(v_sqrt(v), v_set1(rule->correction)), v_set1(rule->epsilon));
    vf step = v_mul(v_gather(table + 4, row), v_set1(rule->step_size));
    v_store(moment, v_blend(came, m, old_moment));
    v_store(square, v_blend(came, v, old_square));
    v_store(weight, v_blend(came, v_sub(old, v_div(v_mul(m, step), size)), old));
}

/* Decays the weights of a tile and lists what was received; returns how many. */
static int64_t list_received(float *weight, const uint8_t *ages, float decay, int32_t *received, int64_t n) {
    int64_t count = 0, i = 0;
    for (; i + W <= n; i += W) {
        vm came = vi_gt(vi_load_u8(ages + i), vi_set1(0));
        unsigned bits = vm_bits(came);
        if (decay != 1.0f) v_store(weight + i, v_mul(v_load(weight + i), v_set1(decay)));
        vi_compress(received + count, came, vi_add(vi_set1((int32_t)i), vi_iota()));
        count += __builtin_popcount(bits);
    }
    for (; i < n; i++) {
        weight[i] *= decay;
        received[count] = (int32_t)i;
        count += ages[i] != 0;
    }
    return count;
}

/* Tile by tile: first a list of what was received, without a branch that depends on it, then entry by entry, so that
 * moments are touched only there. Tiles with most of their coordinates received are faster as vectors, although these
 * have to gather their factors from the table. */
static void aged_adamw(float *weight, const float *grad, const uint8_t *ages, float *moment, float *square,
                       const tw_adamw *rule, int64_t n) {
    enum { TILE = 1024 };
    int32_t received[TILE + TW_PAD];
    for (int64_t start = 0; start < n; start += TILE) {
        int64_t width = least(TILE, n - start), i = 0;
        float *w = weight + start, *m = moment + start, *v = square + start;
        const float *g = grad + start;
        const uint8_t *a = ages + start;
        int64_t count = list_received(w, a, rule->decay, received, width);
        if (2 * count > width) {
            for (; i + W <= width; i += W) adamw_vector(w + i, g + i, vi_load_u8(a + i), m + i, v + i, rule);
            for (; i < width; i++)
                if (a[i]) adamw_one(w + i, g[i], a[i], m + i, v + i, rule);
        } else {
            for (; i < count; i++) {
                int32_t at = received[i];
                adamw_one(w + at, g[at], a[at], m + at, v + at, rule);
            }
        }
    }
}
