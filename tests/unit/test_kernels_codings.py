"""Positions, masks and checksums as bytes: they come back, and damaged bytes are refused."""

import zlib

import pytest
import torch

from thinwire import kernels


@pytest.mark.parametrize("coding", ["uint8", "uint16"])
def test_narrow_indices_come_back(coding):
    x, offsets = torch.randn(1003), (0, 300, 300, 1003)
    rows = kernels.row_topk(x, None, offsets, (100, 0, 90), (3, 1, 5))
    banks = kernels.bank_topk(x, None, offsets, (10, 0, 11), 4)
    layouts = kernels.row_layout(offsets, (100, 0, 90), (3, 1, 5)), kernels.bank_layout(offsets, (10, 0, 11), 4)
    for got, layout in zip((rows, banks), layouts, strict=True):
        packed = kernels.pack_narrow_indices(got.indices, layout, coding)
        assert packed.numel() == len(got.indices) * (1 if coding == "uint8" else 2)
        assert torch.equal(kernels.unpack_narrow_indices(packed, layout, coding), got.indices)


@pytest.mark.parametrize("hostile", [[1, 1, 0, 1], [2, 1, 0, 1], [0, 10, 0, 1], [0, 1, 0], [0, 1, 0, 5]])
def test_hostile_narrow_indices_are_refused(hostile):
    layout = kernels.row_layout((0, 15), (10,), (2,))  # a full row and a short one of 5
    with pytest.raises(ValueError, match="damaged"):
        kernels.unpack_narrow_indices(torch.tensor(hostile, dtype=torch.uint8), layout, "uint8")


def test_a_row_too_long_for_its_coding_is_refused():
    layout = kernels.row_layout((0, 300), (300,), (1,))
    with pytest.raises(ValueError, match="use a wider one"):
        kernels.pack_narrow_indices(torch.tensor([299], dtype=torch.int32), layout, "uint8")
    with pytest.raises(ValueError, match="one per entry"):
        kernels.pack_narrow_indices(torch.tensor([1, 2], dtype=torch.int32), layout, "uint16")


def test_unknown_codings_are_refused():
    one = torch.tensor([0], dtype=torch.int32)
    with pytest.raises(ValueError, match="expected one of"):
        kernels.pack_narrow_indices(one, kernels.row_layout((0, 1), (1,), (1,)), "uint4")


def test_bits_put_the_lowest_index_first():
    mask = torch.tensor([True, False, False, False, False, False, False, False, True])
    assert kernels.pack_bits(mask).tolist() == [1, 1]
    assert torch.equal(kernels.unpack_bits(kernels.pack_bits(mask), 9), mask)
    with pytest.raises(ValueError, match="expected 2 contiguous bytes"):
        kernels.unpack_bits(torch.zeros(3, dtype=torch.uint8), 9)
    with pytest.raises(ValueError, match="bool"):
        kernels.pack_bits(torch.ones(3))


@pytest.mark.parametrize("x", [torch.arange(10), torch.randn(3, 4).t(), torch.ones(5).bfloat16(), torch.zeros(0)])
def test_crc32_is_that_of_the_bytes(x):
    assert kernels.crc32(x) == zlib.crc32(bytes(x.contiguous().view(-1).view(torch.uint8).tolist()))
