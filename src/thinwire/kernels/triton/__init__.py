"""The kernels of `thinwire.kernels.reference` for CUDA tensors, in Triton; importing this needs the `triton` package.

They were tested bit for bit under Triton's interpreter and compiled for GPUs, but never run on one: nothing is known of
their speed. Floating-point operations never fall back: torch on CUDA rounds some of them (division by a scalar, `cumsum`,
`index_add_`) in another way than on the CPU, whose results are the definition.
"""

from functools import partial

from thinwire.kernels.reference_codings import (
    crc32,
    crc32_rows,
)
from thinwire.kernels.rows import Rows
from thinwire.kernels.triton.ages import aged_adamw, count_ages
from thinwire.kernels.triton.bits import pack_bits, unpack_bits
from thinwire.kernels.triton.coarse import coarse_decode, coarse_encode
from thinwire.kernels.triton.measures import all_finite, compensate, segment_amax, segment_moments
from thinwire.kernels.triton.quantize import int4_decode, int4_encode, int8_decode, int8_encode
from thinwire.kernels.triton.scatter import scatter_mean
from thinwire.kernels.triton.select import bank_topk, ef_threshold_pack, ef_topk, row_topk

__all__ = [
    "NAME",
    "aged_adamw",
    "all_finite",
    "bank_topk",
    "coarse_decode",
    "coarse_encode",
    "compensate",
    "count_ages",
    "crc32",
    "crc32_rows",
    "decode_rows",
    "ef_threshold_pack",
    "ef_topk",
    "encode_rows",
    "int4_decode",
    "int4_encode",
    "int8_decode",
    "int8_encode",
    "pack_bits",
    "row_topk",
    "scatter_mean",
    "segment_amax",
    "segment_moments",
    "sum_rows",
    "unpack_bits",
]

NAME = "triton"
_ROWS = Rows(
    {1: partial(coarse_encode, 1), 2: partial(coarse_encode, 2), 4: int4_encode, 8: int8_encode},
    {1: partial(coarse_decode, 1), 2: partial(coarse_decode, 2), 4: int4_decode, 8: int8_decode},
)
encode_rows, decode_rows, sum_rows = _ROWS.encode_rows, _ROWS.decode_rows, _ROWS.sum_rows
