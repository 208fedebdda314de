"""Finds and opens the compiled library, and says how its functions are called."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path

LEVELS = ("portable", "avx2", "avx512")  # in the order of the C enum

_CType = type[c_int] | type[c_int64] | type[c_float] | type[c_void_p] | type[c_uint32]
_SIGNATURES: dict[str, tuple[_CType | None, Sequence[_CType]]] = {
    "tw_best_level": (c_int, []),
    "tw_use_level": (None, [c_int]),
    "tw_compensate": (c_int, [c_void_p, c_void_p, c_float, c_void_p, c_float, c_void_p, c_int64]),
    "tw_threshold_pack": (c_int, [c_void_p] * 3 + [c_int64] + [c_void_p] * 5),
    "tw_row_topk": (c_int, [c_void_p] * 3 + [c_int64] + [c_void_p] * 6),
    "tw_bank_topk": (c_int, [c_void_p] * 3 + [c_int64] + [c_void_p] * 2 + [c_int64] + [c_void_p] * 3),
    "tw_int8_encode": (c_int, [c_void_p] * 3 + [c_int64] * 2 + [c_void_p] * 2),
    "tw_int8_decode": (None, [c_void_p] * 2 + [c_int64] * 2 + [c_float, c_int, c_void_p]),
    "tw_int4_encode": (c_int, [c_void_p] * 3 + [c_int64] * 2 + [c_void_p] * 2),
    "tw_int4_decode": (None, [c_void_p] * 2 + [c_int64] * 2 + [c_float, c_int, c_void_p]),
    "tw_coarse_encode": (c_int, [c_int, *[c_void_p] * 3, *[c_int64] * 2, *[c_void_p] * 2]),
    "tw_coarse_decode": (None, [c_int, *[c_void_p] * 2, *[c_int64] * 2, c_float, c_int, c_void_p]),
    "tw_encode_rows": (c_int, [c_int] + [c_void_p] * 3 + [c_int64] * 3 + [c_void_p, c_int64]),
    "tw_decode_rows": (None, [c_int, c_void_p, *[c_int64] * 4, c_void_p]),
    "tw_sum_rows": (None, [c_int, c_void_p, *[c_int64] * 4, c_float, c_void_p]),
    "tw_segment_amax": (None, [c_void_p, c_int64, c_void_p, c_void_p]),
    "tw_segment_moments": (None, [c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
    "tw_all_finite": (c_int, [c_void_p, c_int64]),
    "tw_scatter_mean": (c_int64, [c_int64, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int64]),
    "tw_count_ages": (None, [c_void_p] * 3 + [c_int, c_int64]),
    "tw_aged_adamw": (None, [c_void_p] * 6 + [c_float] * 4 + [c_int64]),
    "tw_has_crc32": (c_int, []),
    "tw_crc32": (c_uint32, [c_void_p, c_int64]),
    "tw_crc32_rows": (None, [c_void_p] + [c_int64] * 3 + [c_void_p]),
}


@cache
def library() -> ctypes.CDLL:
    """The library beside this file, with typed functions; a call releases the GIL.

    Raises:
        ImportError: it was not built, which installation allows when there is no C compiler.
    """
    found = sorted(Path(__file__).parent.glob("_library*.so"))
    if not found:
        raise ImportError("the C kernels were not built; install a C compiler and reinstall thinwire to get them")
    opened = ctypes.CDLL(str(found[0]))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(opened, name)
        function.restype, function.argtypes = result, arguments
    return opened
