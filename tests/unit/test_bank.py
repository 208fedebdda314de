"""Bank-balanced top-k: how banks are laid, what they keep, and both ways to exchange them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contract.world import run_unit
from thinwire import kernels
from thinwire.comm import simulate
from thinwire.compressors.bank import BankTopK, plan_banks
from thinwire.core import ConfigError, PayloadError, Step, TensorSpec, UnitSpec, make


def _unit(*shapes: tuple[int, ...]) -> UnitSpec:
    return UnitSpec(tuple(TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)))


def _kept_energy(x: Tensor, banks: int, k: int) -> float:
    residual = kernels.bank_topk(x, None, (0, x.numel()), (banks,), k).residual
    return 1 - float(residual.square().sum() / x.square().sum())


@given(st.integers(1, 200_000), st.floats(1e-4, 1), st.lists(st.integers(1, 5000), max_size=4))
def test_banks_are_odd_coprime_and_hold_the_density(numel: int, density: float, widths: list[int]) -> None:
    banks = plan_banks(numel, density, tuple(widths))
    assert banks.count % 2 == 1
    assert all(math.gcd(banks.count, width) == 1 for width in widths)
    longest = -(-numel // banks.count)
    assert longest <= (256 if density * 256 >= 1 else 1 / density)
    chosen = kernels.bank_topk(torch.ones(numel), None, (0, numel), (banks.count,), banks.k)
    assert chosen.values.numel() == banks.selected_elems


@pytest.mark.parametrize("density", [0.25, 0.1, 0.05, 0.02, 0.01, 1 / 256, 0.001])
def test_what_is_sent_is_what_was_asked_for(density: float) -> None:
    unit = _unit((1024, 1024), (1024,), (256, 1000))
    assert BankTopK(density=density).selected_elems(unit) / unit.numel == pytest.approx(density, rel=0.05)


def test_strided_banks_keep_what_contiguous_ones_lose() -> None:
    """Layers of unlike magnitude in one buffer: nearly as good as a global top-k, and no aliasing with the width."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(64, 512, generator=generator) * 10.0**-power for power in range(4)]
    x = torch.cat([layer.flatten() for layer in layers])
    global_topk = kernels.ef_topk(x, None, (0, x.numel()), (x.numel() // 16,))
    best = float(global_topk.values.square().sum() / x.square().sum())
    banks = plan_banks(x.numel(), 1 / 16, (512,))
    strided = _kept_energy(x, banks.count, banks.k)
    contiguous = 1 - float(x.view(-1, 256).abs().sort(dim=1).values[:, :240].square().sum() / x.square().sum())
    assert strided > 0.98 * best
    assert contiguous < 0.6 * best


def test_a_bank_must_not_keep_to_few_columns() -> None:
    """Columns of unlike magnitude: with as many banks as columns, each bank would be one column."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(256, 512, generator=generator) * torch.logspace(0, -4, 512)).flatten()
    banks = plan_banks(x.numel(), 1 / 16, (512,))
    assert _kept_energy(x, banks.count, banks.k) > 1.5 * _kept_energy(x, 512, banks.k)


def test_payload_is_constant_with_one_byte_per_position() -> None:
    unit, compressor = _unit((100, 300)), BankTopK(density=0.02)
    payloads = [compressor.encode(torch.randn(unit.numel) * scale, Step(0, unit)) for scale in (0.0, 1.0)]
    count = compressor.selected_elems(unit)
    assert [(p["values"].numel(), p["byte"].numel()) for p in payloads] == [(4 * count, count)] * 2
    low = BankTopK(density=0.001).encode(torch.randn(unit.numel), Step(0, unit))
    assert "byte" not in low, "banks of 1000 elements need two bytes"


def test_every_bank_loses_at_most_its_share() -> None:
    unit, compressor = _unit((50, 301)), BankTopK(density=0.05)
    x = torch.randn(unit.numel, generator=torch.Generator().manual_seed(1))
    banks = plan_banks(unit.numel, 0.05, (301,))
    residual = compressor.split(x.clone(), Step(0, unit))[1]
    for bank in range(banks.count):
        own = slice(bank, None, banks.count)
        bound = (1 - banks.k / x[own].numel()) * x[own].square().sum()
        assert residual[own].square().sum() <= bound


@pytest.mark.parametrize("values", ["fp32", "bf16", "int4"])
def test_shared_mode_sends_what_the_leader_chose(values: str) -> None:
    unit, world = _unit((40, 64)), 3
    compressor = BankTopK(density=0.05, mode="shared", values=values)
    gradients = [torch.randn(unit.numel, generator=torch.Generator().manual_seed(i)) for i in range(world)]
    for index in range(4):
        done = run_unit(compressor, unit, [gradients], first_step=index)[0]
        chosen = compressor.select(gradients[index % world].clone(), Step(index, unit)).indices
        mean = done.results[0].mean
        outside = torch.ones(unit.numel, dtype=torch.bool)
        outside[chosen.long()] = False
        assert not mean[outside].any(), "nothing but the leader's choice is applied"
        expected = torch.stack(gradients).mean(dim=0)[chosen.long()]
        assert torch.allclose(mean[chosen.long()], expected, atol={"fp32": 1e-6, "bf16": 0.02, "int4": 0.5}[values])
        assert done.sent_bytes == [compressor.wire_bytes(unit, world)] * world


def test_shared_mode_does_not_grow_with_the_world() -> None:
    unit = _unit((512, 512))
    gathered, shared = (BankTopK(density=0.01, mode=mode) for mode in ("gather", "shared"))
    assert gathered.wire_bytes(unit, 16) > 7 * gathered.wire_bytes(unit, 3)
    assert shared.wire_bytes(unit, 16) < 1.5 * shared.wire_bytes(unit, 3)


def test_a_leaders_damaged_positions_are_refused() -> None:
    unit, compressor = _unit((10, 64)), BankTopK(density=0.05, mode="shared")
    exchange = compressor.exchange(torch.randn(unit.numel), {}, Step(0, unit, 1, 2))
    asked = next(exchange)
    with pytest.raises(PayloadError):
        exchange.send(torch.full_like(asked.tensor, 255))  # type: ignore[union-attr]


def test_banks_run_through_all_tensors_of_a_unit() -> None:
    """The grouping matters, as the class says: a tensor of tiny values gets nothing beside a large one."""
    unit = _unit((40, 64), (40, 64))
    x = torch.cat([torch.randn(2560), 1e-3 * torch.randn(2560)])
    (done,) = simulate([BankTopK(density=0.05).exchange(x, {}, Step(0, unit))])
    large, small = (int((part != 0).sum()) for part in done.mean.split(unit.sizes))
    assert large > 100
    assert small < 5


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        ("bank(mode='both')", "expected 'gather' or 'shared'"),
        ("bank(indices='bitmap')", "inside banks"),
        ("bank(density=1.5)", "density is 1.5"),
        ("bank(mode='shared') | pot4", "with a shared mask"),
    ],
)
def test_mistakes_are_answered(spec: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        make(spec)
