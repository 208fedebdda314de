"""The public kernels: what they accept, refuse and promise, whichever backend runs."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.kernels import dispatch, native

OFFSETS = (0, 40, 40, 100)


@pytest.fixture(params=["fast", "reference"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run everything with the kernels of this machine and as on a machine without a compiler."""
    if request.param == "reference":

        def not_built() -> None:
            raise ImportError("not built")

        monkeypatch.setattr(native, "load", not_built)
    dispatch.kernels_for.cache_clear()
    yield
    dispatch.kernels_for.cache_clear()


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(100, generator=generator), torch.randn(100, generator=generator)


def selections(grad, residual, **options):
    """Every kind of selection of one unit."""
    yield kernels.ef_topk(grad, residual, OFFSETS, (4, 0, 6), **options)
    yield kernels.ef_threshold_pack(grad, residual, OFFSETS, (1.0, 1.0, 2.0), **options)
    yield kernels.row_topk(grad, residual, OFFSETS, (10, 0, 25), (2, 1, 3), **options)
    yield kernels.bank_topk(grad, residual, OFFSETS, (10, 0, 25), 2, **options)


def test_the_backend_names_itself(request):
    built = "reference" not in request.node.name and any(Path(native.__file__).parent.glob("_library*.so"))
    assert kernels.backend().startswith("native-" if built else "reference")


def test_a_missing_library_is_logged_not_raised(monkeypatch, caplog):
    def not_built() -> None:
        raise ImportError("not built")

    monkeypatch.setattr(native, "load", not_built)
    dispatch.kernels_for.cache_clear()
    assert kernels.backend() == "reference"
    assert "not built" in caplog.text


def test_nothing_is_lost_between_the_selection_and_the_residual(pair):
    grad, residual = pair
    for got in selections(grad, residual):
        assert torch.equal(got.residual.index_add(0, got.indices, got.values), residual + grad)
        assert torch.all(got.residual[got.indices.long()] == 0)
        assert sum(got.counts) == len(got.values) == len(got.indices) > 0
        assert got.finite


def test_counts_per_segment(pair):
    topk, _, rows, banks = selections(*pair)
    assert topk.counts == (4, 0, 6)
    assert rows.counts == (4 * 2, 0, 2 * 3 + 3)
    assert banks.counts == (10 * 2, 0, 25 * 2)


def test_topk_breaks_ties_by_position():
    got = kernels.ef_topk(torch.tensor([1.0, -2.0, 2.0, 1.0, -1.0]), None, (0, 5), (3,))
    assert got.indices.tolist() == [0, 1, 2]
    assert got.values.tolist() == [1.0, -2.0, 2.0]


def test_bank_order_is_bank_major():
    grad = torch.tensor([1.0, 9.0, 3.0, 8.0, 5.0, 7.0, 6.0])
    got = kernels.bank_topk(grad, None, (0, 7), (2,), 2)
    assert got.indices.tolist() == [4, 6, 1, 3]


def test_out_may_be_a_new_tensor_or_either_input(pair):
    grad, residual = pair
    for number in range(4):
        expected = list(selections(grad, residual))[number]
        for place in (0, 1):
            copies = [grad.clone(), residual.clone()]
            got = _nth_selection(number, *copies, out=copies[place])
            assert got.residual is copies[place]
            assert torch.equal(got.residual, expected.residual)
            assert torch.equal(got.values, expected.values)


def _nth_selection(number, grad, residual, out):
    calls = (
        lambda: kernels.ef_topk(grad, residual, OFFSETS, (4, 0, 6), out=out),
        lambda: kernels.ef_threshold_pack(grad, residual, OFFSETS, (1.0, 1.0, 2.0), out=out),
        lambda: kernels.row_topk(grad, residual, OFFSETS, (10, 0, 25), (2, 1, 3), out=out),
        lambda: kernels.bank_topk(grad, residual, OFFSETS, (10, 0, 25), 2, out=out),
    )
    return calls[number]()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_converted(pair, dtype):
    grad, residual = (x.to(dtype) for x in pair)
    for got, expected in zip(selections(grad, residual), selections(grad.float(), residual.float()), strict=True):
        assert torch.equal(got.values, expected.values)
        assert torch.equal(got.indices, expected.indices)


def test_strided_and_shaped_inputs_are_flattened(pair):
    wide = torch.stack(pair, dim=1)
    strided = wide[:, 0]
    for got, expected in zip(selections(strided, pair[1].view(10, 10)), selections(*pair), strict=True):
        assert torch.equal(got.residual, expected.residual)


def test_a_nan_is_reported_and_never_passes_a_threshold(pair):
    grad, residual = pair
    grad[7] = torch.nan
    topk, threshold, *_ = selections(grad, residual)
    assert not topk.finite
    assert 7 in topk.indices
    assert not threshold.finite
    assert 7 not in threshold.indices
    assert torch.isnan(threshold.residual[7])


def test_empty_units():
    empty = torch.zeros(0)
    assert kernels.ef_topk(empty, empty, (0, 0), (0,)).counts == (0,)
    assert kernels.ef_threshold_pack(empty, None, (0,), ()).counts == ()
    assert kernels.row_topk(empty, None, (0, 0), (3,), (1,)).counts == (0,)
    assert kernels.bank_topk(empty, None, (0, 0), (3,), 1).counts == (0,)
    assert kernels.int8_encode(empty, None).codes.numel() == 0
    assert kernels.int4_encode(empty, None).codes.numel() == 0
    assert kernels.int8_decode(empty.to(torch.int8), empty, 0).numel() == 0
    assert kernels.scatter_mean([], 0, world_size=1).numel() == 0
    assert kernels.segment_amax(empty, (0, 0)).tolist() == [0.0]
    assert kernels.compensate(empty, None)[1]


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda x: kernels.ef_topk(x, None, (0, 50), (1,)), "offsets"),
        (lambda x: kernels.ef_topk(x, None, (0, 60, 50, 100), (1, 1, 1)), "offsets"),
        (lambda x: kernels.ef_topk(x, None, (), ()), "offsets"),
        (lambda x: kernels.ef_topk(x, None, (0, 100), (101,)), "ks: got 101"),
        (lambda x: kernels.ef_topk(x, None, (0, 100), (-1,)), "ks: got -1"),
        (lambda x: kernels.ef_topk(x, None, (0, 100), (1, 1)), "ks: got 2 entries"),
        (lambda x: kernels.ef_topk(x, x[:50], (0, 100), (1,)), "residual: got 50"),
        (lambda x: kernels.ef_topk(x.double(), None, (0, 100), (1,)), "float64"),
        (lambda x: kernels.ef_topk(x.long(), None, (0, 100), (1,)), "int64"),
        (lambda x: kernels.ef_topk(x, None, (0, 100), (1,), out=x.half()), "out"),
        (lambda x: kernels.ef_topk(x[1:], None, (0, 99), (1,), out=x[:-1]), "overlaps grad"),
        (lambda x: kernels.ef_threshold_pack(x, None, (0, 100), (math.nan,)), "NaN"),
        (lambda x: kernels.row_topk(x, None, (0, 100), (0,), (1,)), "row_lengths: got 0"),
        (lambda x: kernels.bank_topk(x, None, (0, 100), (0,), 1), "banks: got 0"),
        (lambda x: kernels.bank_topk(x, None, (0, 100), (1,), -1), "k: got -1"),
        (lambda x: kernels.int8_encode(x, None, block=24), "block: got 24"),
        (lambda x: kernels.int8_decode(x, x, 100), "codes: got torch.float32"),
        (lambda x: kernels.int4_decode(x[:50].byte(), x, 100), "scales: got torch.float32"),
        (lambda x: kernels.int8_decode(x.char(), x[:1], 100, accumulate=True), "accumulate"),
        (lambda x: kernels.scatter_mean([(x, x)], 100, world_size=1), "payload 0"),
        (lambda x: kernels.scatter_mean([], 100, world_size=0), "world_size"),
        (lambda x: kernels.compensate(x, None, velocity=x[:3]), "velocity"),
        (lambda x: kernels.ef_topk(x, x.to("meta"), (0, 100), (1,)), "meta"),
    ],
)
def test_mistakes_are_refused(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call(torch.randn(100))


def test_too_many_elements_for_int32_are_refused():
    with pytest.raises(ValueError, match="split it into several units"):
        kernels.ef_topk(torch.empty(2**31, device="meta"), None, (0, 2**31), (1,))


def test_compensate_with_momentum_and_decay():
    grad, residual, velocity = torch.ones(3), torch.full((3,), 10.0), torch.full((3,), 4.0)
    compensated, finite = kernels.compensate(grad, residual, decay=0.5, velocity=velocity, momentum=0.25)
    assert velocity.tolist() == [2.0] * 3
    assert compensated.tolist() == [7.0] * 3
    assert finite
    assert not kernels.compensate(grad, torch.full((3,), torch.inf))[1]


@pytest.mark.parametrize(("bits", "limit"), [(8, 127), (4, 7)])
def test_quantisation_error_is_at_most_half_a_step(pair, bits, limit):
    encode, decode = getattr(kernels, f"int{bits}_encode"), getattr(kernels, f"int{bits}_decode")
    grad, residual = pair
    coded = encode(grad, residual, block=32)
    decoded = decode(coded.codes, coded.scales, 100, block=32)
    assert torch.allclose(decoded + coded.residual, grad + residual, atol=1e-6)
    steps = coded.scales.float().repeat_interleave(32)[:100]
    # A bf16 scale may round down, which clamps the largest value by up to 1/256 of it more.
    assert torch.all(coded.residual.abs() <= steps * (0.5 + (limit / 256 if bits == 4 else 0.001)))
    base = torch.ones(100)
    assert torch.equal(decode(coded.codes, coded.scales, 100, block=32, weight=0.5, out=base, accumulate=True), base)
    assert torch.allclose(base, 1 + decoded / 2)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_that_is_not_finite_decodes_to_nan_and_leaves_no_residual(bits):
    grad = torch.ones(96)
    grad[40] = torch.inf
    coded = getattr(kernels, f"int{bits}_encode")(grad, None, block=32)
    decoded = getattr(kernels, f"int{bits}_decode")(coded.codes, coded.scales, 96, block=32)
    assert not coded.finite
    assert torch.isnan(decoded[32:64]).all()
    assert torch.isfinite(decoded[:32]).all()
    assert torch.isfinite(decoded[64:]).all()
    assert torch.all(coded.residual[32:64] == 0)


def test_int4_layout():
    grad = torch.tensor([7.0, -7.0, 1.0])
    coded = kernels.int4_encode(grad, None)
    assert coded.codes.tolist() == [15 | 1 << 4, 9 | 8 << 4]
    assert coded.scales.tolist() == [1.0]


def test_scatter_mean_of_two_ranks():
    first = torch.tensor([2.0, 4.0]), torch.tensor([0, 3], dtype=torch.int32)
    second = torch.tensor([6.0]), torch.tensor([3], dtype=torch.int32)
    out = torch.full((5,), 9.0)
    assert kernels.scatter_mean([first, second], 5, world_size=2, out=out) is out
    assert out.tolist() == [1.0, 0.0, 0.0, 5.0, 0.0]


def test_measures():
    x = torch.tensor([1.0, -3.0, 2.0])
    assert kernels.segment_amax(x, (0, 2, 2, 3)).tolist() == [3.0, 0.0, 2.0]
    sums, squares = kernels.segment_moments(x, (0, 2, 3))
    assert sums.tolist() == [-2.0, 2.0]
    assert squares.tolist() == [10.0, 4.0]
    assert kernels.all_finite(x)
    assert not kernels.all_finite(torch.tensor([1.0, torch.inf]))
    assert not kernels.all_finite(torch.tensor([torch.nan]))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), density=st.sampled_from([0.001, 0.1, 1.0]))
def test_selection_keeps_the_largest(seed, density):
    x = torch.randn(3000, generator=torch.Generator().manual_seed(seed))
    got = kernels.ef_topk(x, None, (0, 3000), (max(1, int(density * 3000)),))
    assert got.values.abs().min() >= got.residual.abs().max()
