"""Rows of a message matrix: the same bytes and values as one message at a time, wherever the rows lie."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Bits, native, reference
from thinwire.kernels.native.library import LEVELS, library
from thinwire.kernels.rows import row_bytes

ONE_BY_ONE: dict[Bits, tuple[Any, Any]] = {
    1: (partial(kernels.coarse_encode, bits=1), partial(kernels.coarse_decode, bits=1)),
    2: (partial(kernels.coarse_encode, bits=2), partial(kernels.coarse_decode, bits=2)),
    4: (kernels.int4_encode, kernels.int4_decode),
    8: (kernels.int8_encode, kernels.int8_decode),
}


def values(rows: int, numel: int, seed: int = 0) -> Tensor:
    x = torch.randn(rows * numel, generator=torch.Generator().manual_seed(seed))
    x[:: 2 * numel // 3 + 1] = 0
    return x


def apart(rows: int, length: int, gap: int = 40) -> Tensor:
    """Rows with something else between them."""
    return torch.full((rows, gap + length), 7, dtype=torch.uint8)[:, gap:]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize(("rows", "numel", "block"), [(1, 64, 64), (3, 512, 256), (4, 9 * 1024, 64), (2, 8192, 8192)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rows_are_messages_one_below_the_other(
    bits: Bits, rows: int, numel: int, block: int, with_residual: bool
) -> None:
    encode, decode = ONE_BY_ONE[bits]
    x, messages = values(rows, numel), apart(rows, row_bytes(bits, numel, block))
    old = values(rows, numel).flip(0) if with_residual else None
    residual, finite = kernels.encode_rows(x, old, messages, bits=bits, block=block)
    assert finite
    parts = []
    whole = x if old is None else x + old
    for part, message, lost in zip(whole.view(rows, -1), messages, residual.view(rows, -1), strict=True):
        coded = encode(part, None, block=block)
        assert message.tolist() == [*coded.codes.view(torch.uint8), *coded.scales.view(torch.uint8)]
        assert torch.equal(lost, coded.residual)
        parts.append(decode(coded.codes, coded.scales, numel, block=block))
    assert torch.equal(
        kernels.decode_rows(messages, torch.empty(rows * numel), bits=bits, block=block), torch.cat(parts)
    )
    total = parts[0] * 0.25
    for part in parts[1:]:
        total = total + part * 0.25
    summed = kernels.sum_rows(messages, torch.empty(numel), bits=bits, block=block, weight=0.25)
    assert torch.equal(summed, total)
    assert messages.as_strided((rows,), (messages.stride(0),), 0).tolist() == [7] * rows, "written beside the rows"


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([1, 2, 4, 8]),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 200),
    block=st.sampled_from([16, 64, 256]),
    special=st.sampled_from([1.0, 1e-40, 3e38, float("inf"), float("nan")]),
    level=st.sampled_from(LEVELS),
)
def test_native_rows_equal_the_reference(
    bits: Bits, rows: int, blocks: int, block: int, special: float, level: str
) -> None:
    try:
        native.load()
    except ImportError as error:
        pytest.skip(str(error))
    if LEVELS.index(level) > library().tw_best_level():
        return
    native.use_level(level)
    try:
        numel = blocks * block
        x = values(rows, numel, seed=blocks)
        x[numel // 2] = special
        got, expected = (_all(one, bits, x, rows, block) for one in (native, reference))
    finally:
        native.load()
    assert got[0] == expected[0] == torch.isfinite(x).all()
    assert torch.equal(got[1], expected[1]) or not got[0], "the bits of a scale that is NaN are anybody's"
    for mine, theirs in zip(got[2:], expected[2:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def _all(backend: Any, bits: Bits, x: Tensor, rows: int, block: int) -> tuple[bool, Tensor, Tensor, Tensor, Tensor]:
    numel = x.numel() // rows
    messages = apart(rows, row_bytes(bits, numel, block))
    lost, decoded, summed = torch.empty_like(x), torch.empty_like(x), torch.empty(numel)
    finite = backend.encode_rows(bits, x, x.flip(0), block, messages, lost)
    backend.decode_rows(bits, messages, block, decoded)
    backend.sum_rows(bits, messages, block, 1 / 3, summed)
    return bool(finite), messages.contiguous(), lost, decoded, summed


@pytest.mark.parametrize("length", [0, 1, 63, 64, 1000])
def test_checksums_of_rows_are_zlibs(length: int) -> None:
    rows = torch.randint(0, 256, (3, 8 + length), dtype=torch.uint8)[:, 8:]
    for matrix in (rows, rows.t().contiguous().t()):  # row by row, and column by column in memory
        assert kernels.crc32_rows(matrix) == [zlib.crc32(bytes(row.tolist())) for row in rows]


@pytest.mark.parametrize(
    ("messages", "numel", "told"),
    [
        (torch.zeros(2, 33, dtype=torch.uint8), 128, "of 64 values a row has 34 bytes"),
        (torch.zeros(2, 34), 128, "torch.float32"),
        (torch.zeros(68, dtype=torch.uint8), 128, "one row for each equal part"),
        (torch.zeros(2, 51, dtype=torch.uint8), 192, "whole blocks of 64"),
        (torch.zeros(2, 34, dtype=torch.uint8), 129, "for 129 values"),
        (torch.zeros(0, 34, dtype=torch.uint8), 128, "one row for each equal part"),
        (torch.zeros(2, 35, dtype=torch.uint8)[:, 1:], 128, "multiple of 2 bytes"),
    ],
)
def test_rows_that_do_not_fit_are_refused(messages: Tensor, numel: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        kernels.encode_rows(torch.zeros(numel), None, messages, bits=4, block=64)
    with pytest.raises(ValueError, match=told):
        kernels.decode_rows(messages, torch.zeros(numel), bits=4, block=64)


@pytest.mark.parametrize("messages", [torch.zeros(0, 34, dtype=torch.uint8), torch.zeros(2, 33, dtype=torch.uint8)])
def test_a_sum_of_nothing_or_of_other_rows_is_refused(messages: Tensor) -> None:
    with pytest.raises(ValueError, match="messages: got"):
        kernels.sum_rows(messages, torch.zeros(64), bits=4, block=64)


def test_bytes_that_are_no_matrix_have_no_row_checksums() -> None:
    with pytest.raises(ValueError, match="expected a matrix of bytes"):
        kernels.crc32_rows(torch.zeros(5, dtype=torch.uint8))
