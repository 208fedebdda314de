/* Template part: exact top-k of rows (a whole segment is one row).
 *
 * A row is cut into a few times k disjoint groups. The k-th largest of the groups' maxima is a lower bound for the
 * k-th largest of the row, because k elements reach it. What reaches the bound are the candidates, usually little more
 * than k, and an exact selection among them is the answer. Bad luck (all large values in few groups, or ties) makes
 * more candidates and costs time, never exactness.
 */

enum { GROUPS_PER_KEPT = 3, BITWISE_MAX = 512, DIGITS = 2048 };

/* The key of rank k, and how many of the keys equal to it are among the k largest. */
typedef struct {
    int32_t key;
    int64_t ties;
} cut;

static int64_t count_above(const int32_t *keys, int64_t padded, int32_t limit) {
    const vi limits = vi_set1(limit);
    int64_t count = 0;
    for (int64_t i = 0; i < padded; i += W) count += __builtin_popcount(vm_bits(vi_gt(vi_load(keys + i), limits)));
    return count;
}

/* Few keys: find the key of rank k bit by bit, counting with vectors. Writes W pads after the keys. */
static cut cut_bitwise(int32_t *keys, int64_t n, int64_t k) {
    int32_t high = keys[0], low = keys[0], found;
    for (int64_t i = 1; i < n; i++) {
        high = keys[i] > high ? keys[i] : high;
        low = keys[i] < low ? keys[i] : low;
    }
    int64_t padded = (n + W - 1) / W * W;
    for (int64_t i = n; i < padded; i++) keys[i] = -1;
    int bit = high == low ? -1 : 31 - __builtin_clz((unsigned)(high ^ low));
    found = bit < 0 ? high : (int32_t)((uint32_t)high & ~((2u << bit) - 1));
    for (; bit >= 0; bit--)
        if (count_above(keys, padded, (found | 1 << bit) - 1) >= k) found |= 1 << bit;
    return (cut){found, k - count_above(keys, padded, found)};
}

/* Many keys: histogram of the leading digit, keep the keys that share the digit of rank k, go on with the next digit. */
static cut cut_by_digits(int32_t *keys, int64_t n, int64_t k) {
    for (int shift = 20; n > BITWISE_MAX && shift >= 0; shift -= 10) {
        uint32_t histogram[2][DIGITS] = {{0}}; /* two, so that equal neighbours do not wait for each other */
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++) histogram[i & 1][keys[i] >> shift & (DIGITS - 1)]++;
        int32_t digit = DIGITS - 1;
        while ((int64_t)histogram[0][digit] + histogram[1][digit] < k) {
            k -= (int64_t)histogram[0][digit] + histogram[1][digit];
            digit--;
        }
        for (int64_t i = 0; i < n; i++) {
            int32_t key = keys[i];
            keys[kept] = key;
            kept += (key >> shift & (DIGITS - 1)) == digit;
        }
        n = kept;
    }
    /* After the last digit all keys left are equal. */
    return n > BITWISE_MAX ? (cut){keys[0], k} : cut_bitwise(keys, n, k);
}

/* Compensate a row into `out`, and put the maxima of its groups into `maxima`; `run` vectors make W groups. */
static int64_t compensate_row(const float *grad, const float *residual, float *out, int64_t n, int64_t run,
                              int32_t *maxima, int32_t *largest_seen) {
    int64_t groups = 0, i = 0;
    vi largest = vi_set1(0);
    while (i + W <= n) {
        int64_t end = least(i + run * W, n / W * W);
        vi highest = vi_set1(0);
        for (; i < end; i += W) {
            vf sum = v_sum_at(grad, residual, i);
            v_store(out + i, sum);
            highest = vi_max(highest, v_magnitude(sum));
        }
        largest = vi_max(largest, highest);
        vi_store(maxima + groups, vi_min(highest, vi_set1(TW_NAN_KEY)));
        groups += W;
    }
    int32_t peak = horizontal_max(largest);
    for (; i < n; i++) {
        out[i] = sum_at(grad, residual, i);
        if (magnitude(out[i]) > peak) peak = magnitude(out[i]);
    }
    if (peak > *largest_seen) *largest_seen = peak;
    return groups;
}

/* Everything in the row whose key reaches `bound`, with positions counted from the start of the row. */
static int64_t collect(const float *row, int64_t n, int32_t bound, float *values, int32_t *indices) {
    const vi below = vi_set1(bound - 1);
    int64_t count = 0, i = 0;
    for (; i + W <= n; i += W) {
        vf x = v_load(row + i);
        vm chosen = vi_gt(v_key(x), below);
        unsigned bits = vm_bits(chosen);
        if (bits) {
            v_compress(values + count, chosen, x);
            vi_compress(indices + count, chosen, vi_add(vi_set1((int32_t)i), vi_iota()));
            count += __builtin_popcount(bits);
        }
    }
    for (; i < n; i++) {
        values[count] = row[i];
        indices[count] = (int32_t)i;
        count += key_of(row[i]) >= bound;
    }
    return count;
}

/* Candidates of a compensated row into scratch; afterwards `limit` says which of them are the k largest. */
static int64_t candidates(const float *row, int64_t n, int64_t groups, int64_t k, const tw_scratch *scratch,
                          cut *limit) {
    int32_t bound = groups < k ? 0 : cut_by_digits(scratch->keys, groups, k).key;
    int64_t count = collect(row, n, bound, scratch->values, scratch->indices);
    *limit = (cut){-1, 0};
    if (count > k) {
        for (int64_t j = 0; j < count; j++) scratch->keys[j] = key_of(scratch->values[j]);
        *limit = cut_by_digits(scratch->keys, count, k);
    }
    return count;
}

static inline int within(cut *limit, float x) {
    int32_t key = key_of(x);
    return key > limit->key || (key == limit->key && limit->ties-- > 0);
}

/* The k largest of one row, moved from `out` to `values` and `indices`, which count from the start of the unit. */
static void take_row(const float *grad, const float *residual, float *out, int64_t start, int64_t n, int64_t k,
                     float *values, int32_t *indices, const tw_scratch *scratch, int32_t *largest_seen) {
    int64_t run = k ? n / (GROUPS_PER_KEPT * k) : n;
    int64_t groups = compensate_row(grad + start, residual ? residual + start : NULL, out + start, n,
                                    run > 0 ? run : 1, scratch->keys, largest_seen);
    if (!k) return;
    cut limit;
    int64_t taken = 0, count = candidates(out + start, n, groups, k, scratch, &limit);
    for (int64_t j = 0; j < count; j++) {
        if (!within(&limit, scratch->values[j])) continue;
        values[taken] = scratch->values[j];
        indices[taken++] = (int32_t)start + scratch->indices[j];
        out[start + scratch->indices[j]] = 0.0f;
    }
}

static int row_topk(const float *grad, const float *residual, float *out, int64_t segments, const int64_t *offsets,
                    const int64_t *row_lengths, const int64_t *ks, float *values, int32_t *indices,
                    const tw_scratch *scratch) {
    int32_t largest = 0;
    for (int64_t s = 0; s < segments; s++) {
        int64_t n;
        for (int64_t start = offsets[s]; start < offsets[s + 1]; start += n) {
            n = least(row_lengths[s], offsets[s + 1] - start);
            int64_t k = least(ks[s], n);
            take_row(grad, residual, out, start, n, k, values, indices, scratch, &largest);
            values += k;
            indices += k;
        }
    }
    return largest < TW_INF_KEY;
}
