"""The Triton kernels equal the torch reference on the CPU bit for bit.

Run by `test_kernels_triton.py` in a process of its own: Triton decides when it is imported whether it interprets. With
TRITON_INTERPRET=1 the kernels run on CPU tensors, without it on a GPU.
"""

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.kernels import Bits, Coarse, reference, triton
from thinwire.kernels.ages import adamw_table
from thinwire.kernels.rows import row_bytes
from thinwire.kernels.triton.launch import TILE_ELEMS
from thinwire.kernels.triton.plans import SHORT_TILE_ELEMS

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-45, 1e-38, 3e38, -3.4e38, float("inf"), float("-inf"), float("nan")]
SEVERAL_TILES = 2 * TILE_ELEMS + 5
LONG = SHORT_TILE_ELEMS + 77

Unit = tuple[Tensor, Tensor | None, tuple[int, ...]]


def property_test(examples: int) -> settings:
    """An interpreted launch takes milliseconds, so examples are few and chosen to reach every branch."""
    health = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=health)


@st.composite
def units(draw: st.DrawFn, lengths: tuple[int, ...] = (0, 1, 7, 16, 33, 257, SEVERAL_TILES)) -> Unit:
    """A gradient, perhaps a residual, and segment bounds; with ties, zeros and special values."""
    sizes = draw(st.lists(st.sampled_from(lengths), max_size=3))
    offsets = tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    flavour = draw(st.sampled_from(["normal", "ties", "constant", "tiny"]))
    specials = draw(st.lists(st.sampled_from(SPECIAL), max_size=6))

    def one() -> Tensor:
        x = torch.randn(offsets[-1], generator=generator)
        x = {"normal": x, "ties": (2 * x).round(), "constant": torch.full_like(x, -0.5), "tiny": x * 1e-38}[flavour]
        for value in specials if len(x) else []:
            x[int(torch.randint(len(x), (), generator=generator))] = value
        return x

    return one(), one() if draw(st.booleans()) else None, offsets


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Equal in every bit, but for the payload of NaNs, which no backend defines."""
    got = got.cpu()
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if got.is_floating_point():
        nan = torch.isnan(expected)
        assert torch.equal(torch.isnan(got), nan)
        got, expected = (torch.where(nan, 0.0, x).contiguous().view(torch.uint8) for x in (got, expected))
    assert torch.equal(got, expected)


def on(device: str, x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone().to(device)


def both(name: str, grad: Tensor, residual: Tensor | None, *arguments: object, place: str = "new") -> Any:
    """Run an error-feedback kernel of both backends on copies, with `out` where `place` says."""
    results = []
    for kernels, device in ((triton, DEVICE), (reference, "cpu")):
        mine, rest = on(device, grad), on(device, residual)
        out = {"new": None, "grad": mine, "residual": rest}[place]
        out = torch.full_like(mine, 7.0) if out is None else out
        results.append(getattr(kernels, name)(mine, rest, *arguments, out))
    for got, expected in zip(*results, strict=True):
        if isinstance(expected, Tensor):
            assert_same_bits(got, expected)
        else:
            assert got == expected
    return results[1]


PLACES = st.sampled_from(["new", "grad", "residual"])


@property_test(20)
@given(unit=units((0, 1, 16, 300, SEVERAL_TILES, LONG)), place=PLACES, data=st.data())
def test_topk(unit: Unit, place: str, data: st.DataObject) -> None:
    grad, residual, offsets = unit
    ks = tuple(data.draw(st.integers(0, b - a)) for a, b in pairwise(offsets))
    got = both("ef_topk", grad, residual, offsets, ks, place=place)
    assert got.counts == ks


@pytest.mark.parametrize("k", [0, 1, 777, LONG - 1, LONG])
def test_topk_of_a_long_segment(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(LONG, generator=generator)
    both("ef_topk", x, x.flip(0), (0, LONG), (k,))
    both("ef_topk", (3 * x).round(), None, (0, LONG), (k,))


def test_topk_when_everything_is_tied_takes_the_first() -> None:
    got = both("ef_topk", torch.full((3 * LONG,), -2.0), None, (0, LONG, 3 * LONG), (77, 5000))
    expected = torch.cat((torch.arange(77), LONG + torch.arange(5000))).int()
    assert torch.equal(got.indices, expected)


@pytest.mark.parametrize("numel", [96, LONG])
def test_topk_tells_keys_apart_in_every_digit(numel: int) -> None:
    steps = [0, 1, 2, 127, 128, 129, 1 << 15, 1 << 23]
    keys = torch.tensor([0x3F800000 + steps[i % 8] for i in range(numel)], dtype=torch.int32)
    for k in range(0, numel, numel // 9):
        both("ef_topk", keys.view(torch.float32), None, (0, numel), (k,))


@pytest.mark.parametrize("numel", [96, LONG])
def test_nans_of_all_kinds_are_tied(numel: int) -> None:
    nans = torch.tensor([0x7F800001 + 1000 * i for i in range(numel)], dtype=torch.int32)
    got = both("ef_topk", nans.view(torch.float32), None, (0, numel), (5,))
    assert got.indices.tolist() == [0, 1, 2, 3, 4]
    assert not got.finite


@property_test(20)
@given(unit=units(), place=PLACES, data=st.data())
def test_threshold_pack(unit: Unit, place: str, data: st.DataObject) -> None:
    grad, residual, offsets = unit
    limits = st.sampled_from([-1.0, -0.0, 0.0, 1e-45, 0.1, 0.5, 1.0, 2.0, 1e30, float("inf")])
    both("ef_threshold_pack", grad, residual, offsets, tuple(data.draw(limits) for _ in offsets[1:]), place=place)


@property_test(20)
@given(unit=units((0, 1, 33, 257, SEVERAL_TILES, 2 * LONG)), place=PLACES, data=st.data())
def test_row_topk(unit: Unit, place: str, data: st.DataObject) -> None:
    grad, residual, offsets = unit
    lengths = tuple(data.draw(st.sampled_from([3, 31, 64, 1500, LONG])) for _ in offsets[1:])
    ks = tuple(data.draw(st.integers(0, 40)) for _ in offsets[1:])
    both("row_topk", grad, residual, offsets, lengths, ks, place=place)


@property_test(20)
@given(unit=units((0, 1, 33, 257, SEVERAL_TILES, 2 * LONG)), place=PLACES, k=st.integers(0, 20), data=st.data())
def test_bank_topk(unit: Unit, place: str, k: int, data: st.DataObject) -> None:
    grad, residual, offsets = unit
    banks = tuple(data.draw(st.sampled_from([1, 2, 17, 64, 1200])) for _ in offsets[1:])
    both("bank_topk", grad, residual, offsets, banks, k, place=place)


def test_short_and_long_groups_share_one_payload() -> None:
    x = torch.randn(4 * LONG, generator=torch.Generator().manual_seed(0))
    offsets = (0, LONG, LONG + 500, 4 * LONG - 500, 4 * LONG)
    both("row_topk", x, x.flip(0), offsets, (LONG, 64, LONG - 3, 500), (3, 4, 5, 600))
    both("bank_topk", x, x.flip(0), offsets, (1, 64, 2, 3), 6)


@property_test(16)
@given(unit=units(), place=PLACES, block=st.sampled_from([16, 48, 64, 256, TILE_ELEMS + 48]))
def test_int8_and_int4(unit: Unit, place: str, block: int) -> None:
    grad, residual, _ = unit
    for encode, decode in (("int8_encode", "int8_decode"), ("int4_encode", "int4_decode")):
        coded = both(encode, grad, residual, block, place=place)
        for accumulate in (False, True):
            outs = [torch.ones_like(grad, device=DEVICE), torch.ones_like(grad)]
            for kernels, out in zip((triton, reference), outs, strict=True):
                codes, scales = coded.codes.to(out.device), coded.scales.to(out.device)
                getattr(kernels, decode)(codes, scales, block, 0.3, out, accumulate)
            assert_same_bits(*outs)


@property_test(24)
@given(
    unit=units(),
    place=PLACES,
    block=st.sampled_from([16, 48, 64, 256, TILE_ELEMS + 48]),
    bits=st.sampled_from([1, 2]),
    accumulate=st.booleans(),
)
def test_coarse(unit: Unit, place: str, block: int, bits: Coarse, accumulate: bool) -> None:
    grad, residual, _ = unit
    results = []
    for kernels, device in ((triton, DEVICE), (reference, "cpu")):
        mine, rest = on(device, grad), on(device, residual)
        assert mine is not None
        out = {"new": None, "grad": mine, "residual": rest}[place]
        coded = kernels.coarse_encode(bits, mine, rest, block, torch.full_like(mine, 7.0) if out is None else out)
        decoded = torch.ones_like(grad, device=device)
        kernels.coarse_decode(bits, coded.codes, coded.scales, block, 0.3, decoded, accumulate)
        results.append((coded.codes, coded.scales, coded.residual, decoded, torch.tensor(coded.finite)))
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_rows_of_a_message_matrix(bits: Bits) -> None:
    x = torch.randn(3 * 512, generator=torch.Generator().manual_seed(bits))
    results = []
    for kernels, device in ((triton, DEVICE), (reference, "cpu")):
        mine = x.to(device)
        messages = torch.zeros(3, 40 + row_bytes(bits, 512, 64), dtype=torch.uint8, device=device)
        lost, decoded, summed = torch.empty_like(mine), torch.empty_like(mine), torch.empty(512, device=device)
        assert kernels.encode_rows(bits, mine, mine.flip(0), 64, messages[:, 40:], lost)
        kernels.decode_rows(bits, messages[:, 40:], 64, decoded)
        kernels.sum_rows(bits, messages[:, 40:], 64, 0.25, summed)
        results.append((messages, lost, decoded, summed))
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("encode", ["int8_encode", "int4_encode"])
def test_halves_are_rounded_to_even(encode: str) -> None:
    limit = 127 if encode == "int8_encode" else 7
    halves = torch.arange(-2 * limit, 2 * limit + 1) / 2  # the scale is 1, so these are exactly the ties
    both(encode, halves, None, 512)


def test_scales_between_two_bf16_numbers_are_rounded_to_even() -> None:
    scales = 1 + torch.arange(16) / 256  # bf16 holds every other of these
    got = both("int4_encode", torch.nn.functional.pad(7 * scales.unsqueeze(1), (0, 15)).flatten(), None, 16)
    assert torch.equal(got.scales, scales.to(torch.bfloat16))


@property_test(16)
@given(unit=units(), place=PLACES, decay=st.sampled_from([1.0, 0.9, 0.0]), with_velocity=st.booleans())
def test_compensate(unit: Unit, place: str, decay: float, with_velocity: bool) -> None:
    grad, residual, _ = unit
    results = []
    for kernels, device in ((triton, DEVICE), (reference, "cpu")):
        mine, rest = on(device, grad), on(device, residual)
        velocity = on(device, grad.flip(0)) if with_velocity else None
        out = {"new": None, "grad": mine, "residual": rest}[place]
        out = torch.empty_like(mine) if out is None else out
        finite = kernels.compensate(mine, rest, decay, velocity, 0.7, out)
        results.append((out, finite, torch.zeros(0) if velocity is None else velocity))
    (got, got_finite, got_velocity), (expected, finite, velocity) = results
    assert_same_bits(got, expected)
    assert got_finite == finite
    assert_same_bits(got_velocity, velocity)


@property_test(16)
@given(unit=units())
def test_measures(unit: Unit) -> None:
    x, _, offsets = unit
    mine = x.to(DEVICE)
    assert_same_bits(triton.segment_amax(mine, offsets), reference.segment_amax(x, offsets))
    assert triton.all_finite(mine) == reference.all_finite(x)
    for got, expected in zip(triton.segment_moments(mine, offsets), reference.segment_moments(x, offsets), strict=True):
        assert_same_bits(got, expected)


def scatter_both(payloads: list[tuple[Tensor, Tensor]], world_size: int, numel: int) -> None:
    outs = [torch.full((numel,), 7.0, device=DEVICE), torch.full((numel,), 7.0)]
    triton.scatter_mean([(v.to(DEVICE), i.to(DEVICE)) for v, i in payloads], world_size, outs[0])
    reference.scatter_mean(payloads, world_size, outs[1])
    assert_same_bits(*outs)


def distinct(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(numel, generator=generator)[: numel // 3].int()


def ascending(numel: int, generator: torch.Generator) -> Tensor:
    return distinct(numel, generator).sort().values


def repeated(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randint(numel, (numel // 2 + 3,), generator=generator, dtype=torch.int32)


@property_test(16)
@given(
    numel=st.sampled_from([1, 5, 300, 4 * TILE_ELEMS]),
    ranks=st.integers(0, 3),
    draw_indices=st.sampled_from([ascending, distinct, repeated]),
    seed=st.integers(0, 99),
)
def test_scatter_mean(
    numel: int, ranks: int, draw_indices: Callable[[int, torch.Generator], Tensor], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    payloads = []
    for _ in range(ranks):
        indices = draw_indices(numel, generator)
        payloads.append((torch.randn(len(indices), generator=generator), indices))
    scatter_both(payloads, max(ranks, 1), numel)


def test_scatter_mean_keeps_subnormal_numbers_and_nans() -> None:
    values = torch.tensor([1e-40, -0.0, float("nan"), float("inf")])
    scatter_both([(values, torch.arange(4).int()), (values.flip(0), torch.arange(4).int())], 3, 5)


@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1, -(2**31)])
def test_scatter_mean_refuses_indices_out_of_range(bad: int) -> None:
    payloads = [
        (torch.ones(1, device=DEVICE), torch.tensor([3], dtype=torch.int32, device=DEVICE)),
        (torch.ones(2, device=DEVICE), torch.tensor([0, bad], dtype=torch.int32, device=DEVICE)),
    ]
    with pytest.raises(ValueError, match="payload 1"):
        triton.scatter_mean(payloads, 2, torch.zeros(10, device=DEVICE))


@property_test(12)
@given(numel=st.sampled_from([0, 1, 7, 8, 9, 70, SEVERAL_TILES]), seed=st.integers(0, 99))
def test_bits(numel: int, seed: int) -> None:
    mask = torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = triton.pack_bits(mask.to(DEVICE))
    assert_same_bits(packed, reference.pack_bits(mask))
    assert_same_bits(triton.unpack_bits(packed, numel), mask)


def test_a_mask_that_is_not_contiguous() -> None:
    mask = torch.tensor([True, False, True, True, False, True, False, False, True, True])[::2]
    assert_same_bits(triton.pack_bits(mask.to(DEVICE)), reference.pack_bits(mask))


@property_test(12)
@given(unit=units(), cap=st.sampled_from([1, 3, 200, 255]), seed=st.integers(0, 99))
def test_count_ages(unit: Unit, cap: int, seed: int) -> None:
    mean, _, _ = unit
    since = torch.randint(0, cap + 1, mean.shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    results = []
    for kernels, device in ((triton, DEVICE), (reference, "cpu")):
        mine, ages = since.clone().to(device), torch.full_like(since, 7, device=device)
        kernels.count_ages(mean.to(device), mine, ages, cap)
        results.append((mine, ages))
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


@property_test(12)
@given(unit=units(), decay=st.sampled_from([1.0, 0.999]), epsilon=st.sampled_from([1e-8, 0.0]), seed=st.integers(0, 99))
def test_aged_adamw(unit: Unit, decay: float, epsilon: float, seed: int) -> None:
    grad, _, _ = unit
    generator = torch.Generator().manual_seed(seed)
    ages = torch.randint(-300, 256, grad.shape, generator=generator).clamp_min(0).to(torch.uint8)
    weight, moment = torch.randn(2, len(grad), generator=generator).unbind()
    square = torch.rand(len(grad), generator=generator)
    table = adamw_table(0.9, 0.99, 150, False, torch.device("cpu"))
    results = []
    for kernels, device in ((triton, DEVICE), (reference, "cpu")):
        mine = [x.clone().to(device) for x in (weight, grad, ages, moment, square, table)]
        kernels.aged_adamw(*mine, decay, 1e-2, 1.7, epsilon)
        results.append(mine)
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)
