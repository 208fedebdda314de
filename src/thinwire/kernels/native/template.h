/* All template parts and the table they fill. Include a vec_*.h first and define TW_TABLE, the name of the table. */
#include "common.h"

#include "threshold.h"
#include "topk.h"

#include "ages.h"
#include "bank.h"
#include "measure.h"
#include "quantize.h"

#include "coarse.h"
#include "scatter.h"

const tw_kernels TW_TABLE = {
    .compensate = compensate,
    .threshold_pack = threshold_pack,
    .row_topk = row_topk,
    .bank_topk = bank_topk,
    .int8_encode = int8_encode,
    .int8_decode = int8_decode,
    .int4_encode = int4_encode,
    .int4_decode = int4_decode,
    .coarse_encode = coarse_encode,
    .coarse_decode = coarse_decode,
    .segment_amax = segment_amax,
    .segment_moments = segment_moments,
    .scatter_sorted = scatter_sorted,
    .count_ages = count_ages,
    .aged_adamw = aged_adamw,
};
