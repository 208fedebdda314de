/* Template part: the weighted sum of sorted sparse payloads as one dense stream.
 *
 * The result is made tile by tile, so that additions find their element in the nearest cache. A result too large for
 * any cache is summed up aside and streamed out, so that memory sees each element once, written. Payloads that are not
 * ascending are left to the caller (see tw_scatter_mean), which is told by how many entries were used.
 */

enum { TILE_ELEMS = 4096, MAX_PAYLOADS = 1024, STREAM_MIN_ELEMS = 1 << 22 };

/* Move a tile out past the caches and leave zeros behind. */
static void stream_tile_out(float *tile, float *out, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        v_stream(out + i, v_load(tile + i));
        v_store(tile + i, v_set1(0.0f));
    }
    for (; i < n; i++) {
        out[i] = tile[i];
        tile[i] = 0.0f;
    }
}

static int64_t scatter_sorted(int64_t payloads, const float *const *values, const int32_t *const *indices,
                              const int64_t *counts, float weight, float *out, int64_t numel) {
    float aside[TILE_ELEMS] __attribute__((aligned(64)));
    int64_t at[MAX_PAYLOADS] = {0}, used = 0;
    int stream = numel >= STREAM_MIN_ELEMS && (uintptr_t)out % 64 == 0; /* streaming stores need aligned memory */
    if (payloads > MAX_PAYLOADS) return -1;
    if (stream) memset(aside, 0, sizeof aside);
    for (int64_t start = 0; start < numel; start += TILE_ELEMS) {
        int64_t width = least(TILE_ELEMS, numel - start);
        float *tile = stream ? aside : out + start;
        if (!stream) memset(tile, 0, sizeof(float) * (size_t)width);
        for (int64_t p = 0; p < payloads; p++) {
            int64_t j = at[p];
            /* Unsigned: an index before the tile, hence out of order, is as far off as one behind it. */
            for (; j < counts[p] && (uint64_t)(indices[p][j] - start) < (uint64_t)width; j++)
                tile[indices[p][j] - start] += values[p][j] * weight;
            at[p] = j;
        }
        if (stream) stream_tile_out(aside, out + start, width);
    }
    v_fence();
    for (int64_t p = 0; p < payloads; p++) used += at[p];
    return used;
}
