"""What the C kernels need to know of a layout, computed once: units keep their segments from step to step."""

import ctypes
import itertools
from functools import lru_cache
from typing import Any, NamedTuple

CArray = Any  # ctypes has no type for an array of run-time length


class SelectionPlan(NamedTuple):
    """C arrays and sizes of a row-wise or bank-wise selection."""

    offsets: CArray
    groupings: CArray  # row length or bank count per segment
    ks: CArray
    counts: tuple[int, ...]  # selected entries per segment
    total: int
    longest: int  # elements of the longest row or bank


@lru_cache(maxsize=1024)
def c_int64s(numbers: tuple[int, ...]) -> CArray:
    """The numbers as a C array."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


@lru_cache(maxsize=1024)
def row_plan(offsets: tuple[int, ...], row_lengths: tuple[int, ...] | None, ks: tuple[int, ...]) -> SelectionPlan:
    """The plan of `row_topk`; without row lengths each segment is one row."""
    lengths = _lengths(offsets)
    rows = tuple(max(length, 1) for length in lengths) if row_lengths is None else row_lengths
    counts = tuple(
        length // row * min(k, row) + min(k, length % row) for length, row, k in zip(lengths, rows, ks, strict=True)
    )
    longest = max((min(row, length) for row, length in zip(rows, lengths, strict=True)), default=0)
    return SelectionPlan(c_int64s(offsets), c_int64s(rows), c_int64s(ks), counts, sum(counts), longest)


@lru_cache(maxsize=1024)
def bank_plan(offsets: tuple[int, ...], banks: tuple[int, ...], k: int) -> SelectionPlan:
    """The plan of `bank_topk`."""
    counts, longest = [], 0
    for length, bank_count in zip(_lengths(offsets), banks, strict=True):
        rows, longer_banks = divmod(length, bank_count)
        counts.append(longer_banks * min(k, rows + 1) + (bank_count - longer_banks) * min(k, rows))
        longest = max(longest, rows + (longer_banks > 0))
    return SelectionPlan(c_int64s(offsets), c_int64s(banks), None, tuple(counts), sum(counts), longest)


def _lengths(offsets: tuple[int, ...]) -> list[int]:
    return [stop - start for start, stop in itertools.pairwise(offsets)]
