/* Template part: exact top-k of strided banks; element i of a segment is in bank i % banks.
 *
 * Lanes are neighbouring banks. For small k each lane keeps its k largest keys, sorted, in registers while a tile of
 * banks is streamed; for larger k a few banks at a time are copied together and treated as rows.
 */

enum { SMALL_K_MAX = 8, TILE_BANKS = 1024, TILE_ROWS = 8 };

typedef struct {
    const float *grad, *residual;
    float *out, *values;
    int32_t *indices;
    int64_t start, n, banks; /* the segment */
    int32_t largest;
} bank_job;

/* Rows (within their bank) and keys of the k best so far: [k][TILE_BANKS], best first. */
typedef struct {
    int32_t keys[SMALL_K_MAX][TILE_BANKS];
    int32_t rows[SMALL_K_MAX][TILE_BANKS];
} bank_best;

/* `best[j]` becomes max(best[j], min(new, best[j-1])): an insertion that keeps earlier rows first among equals. */
static inline __attribute__((always_inline)) void insert_best(vi *keys, vi *rows, vi key, vi row, const int k) {
    vm above[SMALL_K_MAX];
    for (int j = 0; j < k; j++) above[j] = vi_gt(key, keys[j]);
    for (int j = k - 1; j > 0; j--) {
        keys[j] = vi_max(keys[j], vi_min(key, keys[j - 1]));
        rows[j] = vi_blend(above[j], vi_blend(above[j - 1], rows[j - 1], row), rows[j]);
    }
    keys[0] = vi_max(keys[0], key);
    rows[0] = vi_blend(above[0], row, rows[0]);
}

/* `rows` rows of W banks from `lane` on: compensate, and insert into the best. */
static inline __attribute__((always_inline)) vi stream_lanes(const bank_job *job, bank_best *best, int64_t first_bank,
                                                             int64_t lane, int64_t row, int64_t rows, const int k) {
    vi keys[SMALL_K_MAX], at[SMALL_K_MAX], largest = vi_set1(0);
    for (int j = 0; j < k; j++) {
        keys[j] = vi_load(best->keys[j] + lane);
        at[j] = vi_load(best->rows[j] + lane);
    }
    for (int64_t r = row; r < row + rows; r++) {
        int64_t i = job->start + r * job->banks + first_bank + lane;
        vf sum = v_sum_at(job->grad, job->residual, i);
        v_store(job->out + i, sum);
        vi size = v_magnitude(sum);
        largest = vi_max(largest, size);
        insert_best(keys, at, vi_min(size, vi_set1(TW_NAN_KEY)), vi_set1((int32_t)r), k);
    }
    for (int j = 0; j < k; j++) {
        vi_store(best->keys[j] + lane, keys[j]);
        vi_store(best->rows[j] + lane, at[j]);
    }
    return largest;
}

static void insert_one(bank_best *best, int64_t lane, int32_t key, int32_t row, int k) {
    int j = k;
    while (j > 0 && key > best->keys[j - 1][lane]) j--;
    if (j == k) return;
    for (int below = k - 1; below > j; below--) {
        best->keys[below][lane] = best->keys[below - 1][lane];
        best->rows[below][lane] = best->rows[below - 1][lane];
    }
    best->keys[j][lane] = key;
    best->rows[j][lane] = row;
}

static void stream_scalar(bank_job *job, bank_best *best, int64_t first_bank, int64_t lane, int64_t width, int64_t row,
                          int k) {
    for (; lane < width; lane++) {
        int64_t i = job->start + row * job->banks + first_bank + lane;
        float sum = sum_at(job->grad, job->residual, i);
        job->out[i] = sum;
        if (magnitude(sum) > job->largest) job->largest = magnitude(sum);
        insert_one(best, lane, key_of(sum), (int32_t)row, k);
    }
}

/* All rows of banks first_bank .. first_bank + width. */
static inline __attribute__((always_inline)) void stream_tile(bank_job *job, bank_best *best, int64_t first_bank,
                                                              int64_t width, const int k) {
    int64_t full_rows = job->n / job->banks, rows;
    int64_t last_width = least(width, job->n - full_rows * job->banks - first_bank); /* of the short last row */
    vi largest = vi_set1(0);
    for (int64_t row = 0; row < full_rows; row += rows) {
        int64_t lane = 0;
        rows = least(TILE_ROWS, full_rows - row);
        for (; lane + W <= width; lane += W)
            largest = vi_max(largest, stream_lanes(job, best, first_bank, lane, row, rows, k));
        for (int64_t r = row; r < row + rows; r++) stream_scalar(job, best, first_bank, lane, width, r, k);
    }
    stream_scalar(job, best, first_bank, 0, last_width, full_rows, k);
    int32_t peak = horizontal_max(largest);
    if (peak > job->largest) job->largest = peak;
}

/* Hand out the best of one bank in ascending order. */
static void emit_bank(bank_job *job, const bank_best *best, int64_t bank, int64_t lane, int k) {
    int32_t rows[SMALL_K_MAX];
    int found = 0;
    for (; found < k && best->keys[found][lane] >= 0; found++) {
        int32_t row = best->rows[found][lane];
        int j = found;
        for (; j > 0 && rows[j - 1] > row; j--) rows[j] = rows[j - 1];
        rows[j] = row;
    }
    for (int j = 0; j < found; j++) {
        int64_t i = job->start + rows[j] * job->banks + bank;
        *job->values++ = job->out[i];
        *job->indices++ = (int32_t)i;
        job->out[i] = 0.0f;
    }
}

static void take_small_k(bank_job *job, bank_best *best, int k) {
    int64_t used_banks = least(job->banks, job->n), width;
    for (int64_t first_bank = 0; first_bank < used_banks; first_bank += width) {
        width = least(TILE_BANKS, used_banks - first_bank);
        memset(best->keys, 0xFF, sizeof(int32_t) * TILE_BANKS * (size_t)k);
        switch (k) { /* a constant k keeps the best in registers */
        case 1: stream_tile(job, best, first_bank, width, 1); break;
        case 2: stream_tile(job, best, first_bank, width, 2); break;
        case 3: stream_tile(job, best, first_bank, width, 3); break;
        case 4: stream_tile(job, best, first_bank, width, 4); break;
        case 5: stream_tile(job, best, first_bank, width, 5); break;
        case 6: stream_tile(job, best, first_bank, width, 6); break;
        case 7: stream_tile(job, best, first_bank, width, 7); break;
        default: stream_tile(job, best, first_bank, width, 8); break;
        }
        for (int64_t lane = 0; lane < width; lane++) emit_bank(job, best, first_bank + lane, lane, k);
    }
}

/* One bank that was copied to `column`: choose as from a row, hand out with the positions of the bank. */
static void take_column(bank_job *job, float *column, int64_t bank, int64_t k, const tw_scratch *scratch) {
    int64_t length = (job->n - bank + job->banks - 1) / job->banks;
    k = least(k, length);
    int64_t run = length / (GROUPS_PER_KEPT * k);
    int64_t groups = compensate_row(column, NULL, column, length, run > 0 ? run : 1, scratch->keys, &job->largest);
    cut limit;
    int64_t count = candidates(column, length, groups, k, scratch, &limit);
    for (int64_t j = 0; j < count; j++) {
        if (!within(&limit, scratch->values[j])) continue;
        int64_t i = job->start + scratch->indices[j] * job->banks + bank;
        *job->values++ = scratch->values[j];
        *job->indices++ = (int32_t)i;
        job->out[i] = 0.0f;
    }
}

static void take_large_k(bank_job *job, int64_t k, const tw_scratch *scratch) {
    int64_t used_banks = least(job->banks, job->n), rows = (job->n + job->banks - 1) / job->banks;
    float *segment = job->out + job->start;
    compensate(job->grad + job->start, job->residual ? job->residual + job->start : NULL, 1.0f, NULL, 0.0f, segment,
               job->n);
    for (int64_t first_bank = 0; first_bank < used_banks; first_bank += TW_COPY_BANKS) {
        int64_t width = least(TW_COPY_BANKS, used_banks - first_bank);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t lane = 0; lane < width && row * job->banks + first_bank + lane < job->n; lane++)
                scratch->columns[lane * rows + row] = segment[row * job->banks + first_bank + lane];
        for (int64_t lane = 0; lane < width; lane++)
            take_column(job, scratch->columns + lane * rows, first_bank + lane, k, scratch);
    }
}

static int bank_topk(const float *grad, const float *residual, float *out, int64_t segments, const int64_t *offsets,
                     const int64_t *banks, int64_t k, float *values, int32_t *indices, const tw_scratch *scratch) {
    bank_best best;
    bank_job job = {grad, residual, out, values, indices, 0, 0, 0, 0};
    for (int64_t s = 0; s < segments; s++) {
        job.start = offsets[s];
        job.n = offsets[s + 1] - offsets[s];
        job.banks = banks[s];
        if (k == 0) {
            int finite = compensate(grad + job.start, residual ? residual + job.start : NULL, 1.0f, NULL, 0.0f,
                                    out + job.start, job.n);
            job.largest = finite ? job.largest : TW_INF_KEY;
        } else if (k <= SMALL_K_MAX) {
            take_small_k(&job, &best, (int)k);
        } else {
            take_large_k(&job, k, scratch);
        }
    }
    return job.largest < TW_INF_KEY;
}
