"""The C kernels equal the torch reference bit for bit, on every instruction set this machine runs."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.kernels import native, reference
from thinwire.kernels.native.library import LEVELS, library

try:
    native.load()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

RUNNABLE = LEVELS[: library().tw_best_level() + 1]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-45, 1e-38, 3e38, -3.4e38, float("inf"), float("-inf"), float("nan")]


@pytest.fixture(params=RUNNABLE, autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run everything on each instruction set, then return to the best."""
    native.use_level(request.param)
    yield request.param
    native.load()


def property_test(examples: int):
    """Hypothesis settings: the level fixture is meant to be shared by all examples of a test."""
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, suppress_health_check=health)


@st.composite
def units(draw: st.DrawFn) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """A gradient, perhaps a residual, and segment bounds; with ties, zeros and special values."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 7, 15, 16, 17, 33, 100, 257, 700, 2100]), max_size=4))
    offsets = tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    flavour = draw(st.sampled_from(["normal", "ties", "sparse", "constant", "tiny", "clustered"]))
    specials = draw(st.lists(st.sampled_from(SPECIAL), max_size=6))

    def one() -> Tensor:
        x = torch.randn(offsets[-1], generator=generator)
        x = {
            "normal": x,
            "ties": (2 * x).round(),
            "sparse": torch.where(x > 2, x, 0.0),
            "constant": torch.full_like(x, -0.5),
            "tiny": x * 1e-38,
            "clustered": torch.where(torch.arange(len(x)) < len(x) // 5, 100 * x, x),
        }[flavour]
        for value in specials if len(x) else []:
            x[int(torch.randint(len(x), (), generator=generator))] = value
        return x

    return one(), one() if draw(st.booleans()) else None, offsets


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Equal in every bit, but for the payload of NaNs, which no backend defines."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if got.is_floating_point():
        nan = torch.isnan(expected)
        assert torch.equal(torch.isnan(got), nan)
        got, expected = (torch.where(nan, 0.0, x).contiguous().view(torch.uint8) for x in (got, expected))
    assert torch.equal(got, expected)


def both(name: str, grad: Tensor, residual: Tensor | None, *arguments: object, place: str = "new"):
    """Run an error-feedback kernel of both backends on copies, with `out` where `place` says."""
    results = []
    for kernels in (native, reference):
        mine, rest = grad.clone(), None if residual is None else residual.clone()
        out = {"new": torch.empty_like(mine), "grad": mine, "residual": rest}[place]
        results.append(getattr(kernels, name)(mine, rest, *arguments, torch.empty_like(mine) if out is None else out))
    for got, expected in zip(*results, strict=True):
        if isinstance(expected, Tensor):
            assert_same_bits(got, expected)
        else:
            assert got == expected
    return results[0]


PLACES = st.sampled_from(["new", "grad", "residual"])


@property_test(150)
@given(unit=units(), place=PLACES, data=st.data())
def test_topk(unit, place, data):
    grad, residual, offsets = unit
    ks = tuple(data.draw(st.integers(0, b - a)) for a, b in itertools.pairwise(offsets))
    got = both("ef_topk", grad, residual, offsets, ks, place=place)
    assert got.counts == ks


@property_test(100)
@given(unit=units(), place=PLACES, data=st.data())
def test_threshold_pack(unit, place, data):
    grad, residual, offsets = unit
    limits = st.sampled_from([-1.0, -0.0, 0.0, 1e-45, 0.1, 0.5, 1.0, 2.0, 1e30, float("inf")])
    both("ef_threshold_pack", grad, residual, offsets, tuple(data.draw(limits) for _ in offsets[1:]), place=place)


@property_test(100)
@given(unit=units(), place=PLACES, data=st.data())
def test_row_topk(unit, place, data):
    grad, residual, offsets = unit
    lengths = tuple(data.draw(st.sampled_from([1, 3, 16, 31, 64, 200, 1500])) for _ in offsets[1:])
    ks = tuple(data.draw(st.integers(0, 40)) for _ in offsets[1:])
    both("row_topk", grad, residual, offsets, lengths, ks, place=place)


@property_test(150)
@given(unit=units(), place=PLACES, k=st.integers(0, 20), data=st.data())
def test_bank_topk(unit, place, k, data):
    grad, residual, offsets = unit
    banks = tuple(data.draw(st.sampled_from([1, 2, 5, 16, 17, 64, 100, 1200])) for _ in offsets[1:])
    both("bank_topk", grad, residual, offsets, banks, k, place=place)


@property_test(60)
@given(unit=units(), place=PLACES, block=st.sampled_from([16, 64, 256]))
def test_int8_and_int4(unit, place, block):
    grad, residual, _ = unit
    for encode, decode in (("int8_encode", "int8_decode"), ("int4_encode", "int4_decode")):
        coded = both(encode, grad, residual, block, place=place)
        for accumulate in (False, True):
            outs = [torch.ones_like(grad), torch.ones_like(grad)]
            for kernels, out in zip((native, reference), outs, strict=True):
                getattr(kernels, decode)(coded.codes, coded.scales, block, 0.3, out, accumulate)
            assert_same_bits(*outs)


@property_test(60)
@given(unit=units(), place=PLACES, block=st.sampled_from([16, 48, 64, 256]), bits=st.sampled_from([1, 2]))
def test_coarse(unit, place, block, bits):
    grad, residual, _ = unit
    results = []
    for kernels in (native, reference):
        mine, rest = grad.clone(), None if residual is None else residual.clone()
        out = {"new": None, "grad": mine, "residual": rest}[place]
        out = torch.empty_like(mine) if out is None else out
        coded = kernels.coarse_encode(bits, mine, rest, block, out)
        added, written = torch.ones_like(grad), torch.empty_like(grad)
        kernels.coarse_decode(bits, coded.codes, coded.scales, block, 0.3, added, True)
        kernels.coarse_decode(bits, coded.codes, coded.scales, block, 1.0, written, False)
        results.append((coded.codes, coded.scales, coded.residual, added, written, torch.tensor(coded.finite)))
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


@property_test(60)
@given(unit=units(), place=PLACES, decay=st.sampled_from([1.0, 0.9, 0.0]), with_velocity=st.booleans())
def test_compensate(unit, place, decay, with_velocity):
    grad, residual, _ = unit
    results = []
    for kernels in (native, reference):
        mine, rest = grad.clone(), None if residual is None else residual.clone()
        velocity = grad.flip(0).clone() if with_velocity else None
        out = {"new": torch.empty_like(mine), "grad": mine, "residual": rest}[place]
        out = torch.empty_like(mine) if out is None else out
        finite = kernels.compensate(mine, rest, decay, velocity, 0.7, out)
        results.append((out, finite, torch.zeros(0) if velocity is None else velocity))
    assert_same_bits(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert_same_bits(results[0][2], results[1][2])


@property_test(60)
@given(unit=units())
def test_measures(unit):
    x, _, offsets = unit
    assert_same_bits(native.segment_amax(x, offsets), reference.segment_amax(x, offsets))
    assert native.all_finite(x) == reference.all_finite(x)
    for got, expected in zip(native.segment_moments(x, offsets), reference.segment_moments(x, offsets), strict=True):
        assert_same_bits(got, expected)


@property_test(60)
@given(
    numel=st.sampled_from([1, 5, 4095, 4096, 9000]),
    ranks=st.integers(0, 4),
    ordered=st.booleans(),
    seed=st.integers(0, 99),
)
def test_scatter_mean(numel, ranks, ordered, seed):
    generator = torch.Generator().manual_seed(seed)
    payloads = []
    for _ in range(ranks):
        indices = torch.randperm(numel, generator=generator, dtype=torch.int32)[: numel // 3]
        indices = indices.sort().values if ordered else indices
        payloads.append((torch.randn(len(indices), generator=generator), indices))
    outs = [torch.full((numel,), 7.0), torch.full((numel,), 7.0)]
    native.scatter_mean(payloads, max(ranks, 1), outs[0])
    reference.scatter_mean(payloads, max(ranks, 1), outs[1])
    assert_same_bits(*outs)


def test_scatter_mean_streams_large_results_past_the_cache():
    numel = (1 << 22) + 5  # from 1 << 22 on they are streamed
    indices = torch.arange(0, numel, 30, dtype=torch.int32)
    payloads = [(torch.randn(len(indices)), indices), (torch.ones(2), torch.tensor([0, numel - 1], dtype=torch.int32))]
    outs = [torch.full((numel,), 7.0), torch.full((numel,), 7.0)]
    native.scatter_mean(payloads, 3, outs[0])
    reference.scatter_mean(payloads, 3, outs[1])
    assert_same_bits(*outs)


@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1, -(2**31)])
def test_scatter_mean_refuses_indices_out_of_range(bad):
    payloads = [
        (torch.ones(1), torch.tensor([3], dtype=torch.int32)),
        (torch.ones(2), torch.tensor([0, bad], dtype=torch.int32)),
    ]
    for kernels in (native, reference):
        with pytest.raises(ValueError, match="payload 1"):
            kernels.scatter_mean(payloads, 2, torch.zeros(10))


@pytest.mark.parametrize("density", [0.001, 0.01, 0.5])
def test_topk_of_a_large_tensor(density):
    generator = torch.Generator().manual_seed(3)
    grad, residual = torch.randn(300_001, generator=generator), torch.randn(300_001, generator=generator)
    both("ef_topk", grad, residual, (0, len(grad)), (int(density * len(grad)),))


def test_topk_when_everything_is_tied_takes_the_first():
    got = both("ef_topk", torch.full((100_000,), -2.0), None, (0, 100_000), (777,))
    assert torch.equal(got.indices, torch.arange(777, dtype=torch.int32))


@property_test(40)
@given(bits=st.lists(st.booleans(), max_size=70))
def test_bits(bits):
    mask = torch.tensor(bits, dtype=torch.bool)
    packed = native.pack_bits(mask)
    assert torch.equal(packed, reference.pack_bits(mask))
    assert torch.equal(native.unpack_bits(packed, len(bits)), mask)
    assert torch.equal(reference.unpack_bits(packed, len(bits)), mask)


def test_a_level_the_machine_lacks_is_refused():
    with pytest.raises(ValueError, match="expected one that this machine runs"):
        native.use_level("avx1024")
