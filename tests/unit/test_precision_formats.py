"""Wire formats: fast paths equal their slow twins, errors stay within the bounds in the registry, odd input is safe."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import thinwire
from thinwire.comm import simulate
from thinwire.core import Step, UnitSpec
from thinwire.formats import FORMATS, Encoded, WireFormat, fp8, grids, reference, wire_format

TABLED = ("fp16", "fp8", "fp8_e5m2", "float4", "pot4", "flint4")
FEW_BITS = [name for name, fmt in FORMATS.items() if fmt.stochastic]
SIZES = (1, 2, 63, 64, 65, 255, 256, 257, 1000)


def normal(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def decoded(fmt: WireFormat, encoded: Encoded, numel: int) -> Tensor:
    out = torch.empty(numel)
    fmt.decode(encoded.codes, encoded.scales, 1.0, out, False)
    return out


def round_trip(name: str, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    fmt = wire_format(name)
    return decoded(fmt, fmt.encode(x.clone(), generator), x.numel())


@pytest.mark.parametrize("name", TABLED)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e30, 3e-39])
def test_fast_path_equals_slow_twin(name: str, scale: float) -> None:
    x = torch.cat([normal(700, 1, scale), normal(300, 2) ** 5 * scale])
    assert torch.equal(round_trip(name, x).abs(), reference.round_trip(x, reference.table_of(name)).abs())


@pytest.mark.parametrize("name", TABLED)
def test_fast_path_equals_slow_twin_at_every_entry_and_midpoint(name: str) -> None:
    """One block per table entry: its value, its neighbours by one bit, and the middle to the next entry."""
    table = reference.table_of(name)
    magnitudes = torch.tensor(table.magnitudes[:: max(1, len(table.magnitudes) // 512)])
    largest = torch.full_like(magnitudes, table.magnitudes[-1])
    middles = (magnitudes + torch.cat([magnitudes[1:], magnitudes[-1:]])) / 2
    near = [torch.nextafter(middles, largest * s) for s in (0.0, 1.0)]
    columns = torch.stack([largest, magnitudes, -magnitudes, middles, -middles, *near], dim=1)
    x = torch.nn.functional.pad(columns, (0, table.block - columns.shape[1])).view(-1)
    assert torch.equal(round_trip(name, x), reference.round_trip(x, table))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("numel", SIZES)
def test_residual_bytes_and_bound(name: str, numel: int) -> None:
    fmt, x = wire_format(name), normal(numel, numel)
    encoded = fmt.encode(x.clone())
    got = decoded(fmt, encoded, numel)
    assert encoded.codes.nbytes == fmt.code_bytes(numel)
    assert (0 if encoded.scales is None else encoded.scales.nbytes) == fmt.scale_bytes(numel)
    assert torch.equal(encoded.residual, x - got)
    for block, error in zip(x.split(fmt.block), encoded.residual.split(fmt.block), strict=True):
        assert error.abs().max() <= fmt.error_bound * block.abs().max() * (1 + 1e-6)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp32"])
def test_the_error_bound_is_not_idle(name: str) -> None:
    """Some value comes close to the bound, so the bound says something."""
    fmt, x = wire_format(name), normal(1 << 18)
    errors = fmt.encode(x.clone()).residual.view(-1, fmt.block).abs().amax(dim=1)
    assert (errors / x.view(-1, fmt.block).abs().amax(dim=1)).max() >= 0.7 * fmt.error_bound


@pytest.mark.parametrize("name", FORMATS)
def test_decode_adds_with_weight(name: str) -> None:
    fmt, x = wire_format(name), normal(100)
    encoded = fmt.encode(x.clone())
    out = torch.ones(100)
    fmt.decode(encoded.codes, encoded.scales, 0.25, out, True)
    torch.testing.assert_close(out, 1 + 0.25 * decoded(fmt, encoded, 100))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_block(name: str, bad: float) -> None:
    fmt, x = wire_format(name), normal(1024)
    x[5] = bad
    encoded = fmt.encode(x.clone())
    got = decoded(fmt, encoded, 1024)
    assert torch.isfinite(encoded.residual).all()
    assert not torch.isfinite(got[5])
    assert torch.isfinite(got[fmt.block if fmt.block > 5 else 6 :]).all()


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120),
        max_size=80,
    )
)
def test_any_finite_values_stay_finite_and_within_the_bound(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    for name, fmt in FORMATS.items():
        got = round_trip(name, x)
        assert torch.isfinite(got).all(), name
        for block, back in zip(x.split(fmt.block), got.split(fmt.block), strict=True):
            if block.numel():
                slack = 1e-36  # scales are normal fp32 numbers, so a block near the smallest of them may be lost
                assert (block - back).abs().max() <= fmt.error_bound * block.abs().max() * (1 + 1e-5) + slack, name


@pytest.mark.parametrize("name", FEW_BITS)
def test_stochastic_rounding_has_no_bias_and_only_neighbours(name: str) -> None:
    x, draws = normal(256, 3), 400
    generator = torch.Generator().manual_seed(0)
    rounded = torch.stack([round_trip(name, x, generator) for _ in range(draws)])
    deviation = float(rounded.std(dim=0).max())
    assert deviation > 0
    assert (rounded.mean(dim=0) - x).abs().max() <= 6 * deviation / draws**0.5
    assert all(len(column.unique()) <= 2 for column in rounded.T), "a value went further than to its neighbours"


def test_fp16_keeps_small_values_beside_large_ones() -> None:
    x = torch.tensor([1.0, 2.0**-20, 2.0**-24, -(2.0**-25)])
    assert (round_trip("fp16", x) != 0).all()


def test_fp16_rounds_half_as_coarsely_as_ieee_half() -> None:
    x = normal(1 << 16)
    ours, theirs = (float((x - y).norm() / x.norm()) for y in (round_trip("fp16", x), x.half().float()))
    assert 0.45 <= ours / theirs <= 0.55


def test_fp8_codes_are_those_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for variant in fp8.VARIANTS.values():
        finite = torch.isfinite(codes.view(variant.dtype).float())
        values = fp8.values_of(codes, variant)
        assert torch.equal(values[finite], codes.view(variant.dtype).float()[finite])
        assert float(values[finite].max()) == variant.largest


def test_no_single_grid_wins() -> None:
    """The reason for ``best4``: which grid errs least depends on the distribution."""
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(1 << 15, generator=generator)
    spread = gauss * torch.exp(2 * torch.randn(1 << 15, generator=generator))
    winners = [
        min(grids.GRIDS, key=lambda grid: float(grids.encode_mixed(x.clone(), *_on(grid)).residual.norm()))
        for x in (torch.rand(1 << 15, generator=generator) - 0.5, gauss, spread)
    ]
    assert len(set(winners)) == 3, winners


def _on(grid: str) -> tuple[Tensor, Tensor]:
    return torch.tensor([grids.GRID_NAMES.index(grid)]), torch.ones(1)


def test_blocks_on_different_grids_travel_together() -> None:
    x = normal(4 * grids.BLOCK)
    grid, clip = torch.arange(4), torch.tensor([1.0, 0.8, 1.0, 0.65])
    encoded = grids.encode_mixed(x.clone(), grid, clip)
    assert encoded.scales is not None
    out = torch.empty_like(x)
    grids.decode_mixed(encoded.codes, encoded.scales, grid, 1.0, out, False)
    for number, (block, got) in enumerate(zip(x.split(grids.BLOCK), out.split(grids.BLOCK), strict=True)):
        alone = grids.encode_mixed(block.clone(), grid[number : number + 1], clip[number : number + 1])
        assert torch.equal(got, block - alone.residual)


@pytest.mark.parametrize("values", ["fp16", "bf16", "int8", "int4", "int2", "int1", "fp8", "float4", "pot4", "flint4"])
@pytest.mark.parametrize("numel", [7, 1000, 1001])
def test_sparse_values_in_any_format_with_the_error_in_the_residual(values: str, numel: int) -> None:
    compressor = thinwire.make(f"ef | topk(density=0.1) | {values}")
    assert thinwire.make(str(compressor)) == compressor
    unit, world = UnitSpec.flat(numel), 3
    xs = [normal(numel, rank) for rank in range(world)]
    steps = [Step(0, unit, rank, world) for rank in range(world)]
    done = simulate([compressor.exchange(x.clone(), compressor.init(unit), s) for x, s in zip(xs, steps, strict=True)])
    kept = torch.stack([result.state["residual"] for result in done])
    torch.testing.assert_close((torch.stack(xs) - kept).mean(dim=0), done[0].mean, rtol=1e-5, atol=1e-6)
    sent = done[0].mean != 0
    assert kept[:, sent].abs().sum() > 0, "the rounding error of what was sent is not in the residual"


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(thinwire.ConfigError, match=r"unknown value format 'fp7'.*flint4"):
        wire_format("fp7")
    with pytest.raises(thinwire.ConfigError, match=r"expected 'e4m3' or 'e5m2'"):
        thinwire.make("fp8(variant='e3m4')")
    with pytest.raises(thinwire.ConfigError, match=r"'nearest' or 'stochastic'"):
        thinwire.make("int8(rounding='up')")
    with pytest.raises(thinwire.ConfigError, match="at least 1"):
        thinwire.make("best4(refresh=0)")
