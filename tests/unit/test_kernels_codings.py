"""Values and indices as bytes: they come back, and damaged bytes are refused."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import kernels

INDICES = torch.tensor([0, 1, 7, 65_536, 65_537, 300_000], dtype=torch.int32)


@pytest.mark.parametrize("coding", ["int32", "delta16", "bitmap"])
@settings(max_examples=40, deadline=None)
@given(positions=st.sets(st.integers(0, 199_999), max_size=40))
def test_indices_come_back(coding, positions):
    indices = torch.tensor(sorted(positions), dtype=torch.int32)
    packed = kernels.pack_indices(indices, 200_000, coding)
    assert packed.dtype is torch.uint8
    assert torch.equal(kernels.unpack_indices(packed, len(indices), 200_000, coding), indices)


def test_sizes_of_the_codings():
    numel = 300_001
    assert kernels.pack_indices(INDICES, numel, "int32").numel() == 4 * 6
    assert kernels.pack_indices(INDICES, numel, "delta16").numel() == 2 * (6 + 3)  # one gap needs three escapes
    assert kernels.pack_indices(INDICES, numel, "bitmap").numel() == 37_501


def test_delta16_escapes():
    just_below, just_above = (torch.tensor([gap], dtype=torch.int32) for gap in (65_534, 65_535))
    assert kernels.pack_indices(just_below, 70_000, "delta16").tolist() == [0xFE, 0xFF]
    assert kernels.pack_indices(just_above, 70_000, "delta16").tolist() == [0xFF, 0xFF, 0, 0]


@pytest.mark.parametrize("coding", ["delta16", "bitmap"])
@pytest.mark.parametrize("bad", [[3, 2], [2, 2], [-1, 2], [2, 10]])
def test_only_ascending_indices_in_range_are_packed(coding, bad):
    with pytest.raises(ValueError, match="ascend strictly"):
        kernels.pack_indices(torch.tensor(bad, dtype=torch.int32), 10, coding)


@pytest.mark.parametrize(
    ("hostile", "count", "coding"),
    [
        ([1, 0, 0, 0], 2, "int32"),  # too short
        ([10, 0, 0, 0], 1, "int32"),  # past the end
        ([255, 255, 255, 255], 1, "int32"),  # negative
        ([1], 0, "delta16"),  # half a word
        ([9, 0, 0, 0], 2, "delta16"),  # second index past the end
        ([1, 0], 2, "delta16"),  # one index missing
        ([1, 0, 1, 0], 1, "delta16"),  # one index too many
        ([255, 255], 0, "delta16"),  # an escape that leads nowhere
        ([1, 0], 2, "bitmap"),  # one index missing
        ([3, 0], 1, "bitmap"),  # one index too many
        ([0, 4], 1, "bitmap"),  # bit 10 of 10
        ([1], 1, "bitmap"),  # too short
        ([], -1, "bitmap"),
        ([], 11, "delta16"),
    ],
)
def test_hostile_bytes_are_refused(hostile, count, coding):
    with pytest.raises(ValueError, match=r"damaged|expected 0\.\.9"):
        kernels.unpack_indices(torch.tensor(hostile, dtype=torch.uint8), count, 10, coding)


def test_bytes_may_start_anywhere():
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), kernels.pack_indices(INDICES, 300_001, "int32")))[1:]
    assert torch.equal(kernels.unpack_indices(shifted, 6, 300_001, "int32"), INDICES)
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), kernels.pack_indices(INDICES, 300_001, "delta16")))[1:]
    assert torch.equal(kernels.unpack_indices(shifted, 6, 300_001, "delta16"), INDICES)


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


@pytest.mark.parametrize(
    ("coding", "bytes_", "error"), [("fp32", 4000, 0.0), ("fp16", 2000, 1e-3), ("bf16", 2000, 8e-3)]
)
def test_values_come_back(coding, bytes_, error):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    packed = kernels.pack_values(values, coding)
    assert packed.numel() == bytes_
    assert torch.all((kernels.unpack_values(packed, 1000, coding) - values).abs() <= error * values.abs())


def test_int8_values_come_back():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    packed = kernels.pack_values(values, "int8")
    assert packed.numel() == 1000 + 4 * 4
    shifted = torch.cat((torch.zeros(3, dtype=torch.uint8), packed))[3:]
    assert torch.allclose(kernels.unpack_values(shifted, 1000, "int8"), values, atol=float(values.abs().max()) / 250)


@pytest.mark.parametrize("coding", ["fp32", "fp16", "bf16", "int8"])
def test_a_wrong_number_of_value_bytes_is_refused(coding):
    packed = kernels.pack_values(torch.randn(10), coding)
    with pytest.raises(ValueError, match="damaged or belongs to another layout"):
        kernels.unpack_values(packed[:-1], 10, coding)


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.pack_indices(INDICES, 300_001, "int24"),
        lambda: kernels.unpack_indices(torch.zeros(0, dtype=torch.uint8), 0, 1, "int24"),
        lambda: kernels.pack_values(torch.ones(1), "fp8"),
        lambda: kernels.unpack_values(torch.zeros(1, dtype=torch.uint8), 1, "fp8"),
        lambda: kernels.pack_narrow_indices(INDICES, kernels.row_layout((0, 1), (1,), (1,)), "uint4"),
    ],
)
def test_unknown_codings_are_refused(call):
    with pytest.raises(ValueError, match="expected one of"):
        call()


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
