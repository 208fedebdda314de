"""ADTopk: rows, phases, reused thresholds, and what ranks agree on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contract.world import run_unit
from thinwire.comm import simulate
from thinwire.compressors.adtopk import ADTopK
from thinwire.compressors.dense import Dense
from thinwire.compressors.shared import threshold_reuse
from thinwire.core import ConfigError, Payload, State, Step, TensorSpec, UnitSpec, make
from thinwire.fusion.prepare import prepare


def _unit(*shapes: tuple[int, ...]) -> UnitSpec:
    return UnitSpec(tuple(TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)))


def _noise(unit: UnitSpec, *key: int) -> Tensor:
    return torch.randn(unit.numel, generator=torch.Generator().manual_seed(hash(key) % 2**31))


def _alone(compressor: ADTopK, x: Tensor, state: State, step: Step) -> tuple[Tensor, State]:
    (done,) = simulate([compressor.exchange(x.clone(), state, step)])
    return done.mean, done.state


def test_no_row_goes_missing() -> None:
    unit = _unit((40, 100))
    x = _noise(unit).view(40, 100) * torch.logspace(0, -6, 40)[:, None]
    adtopk, _ = _alone(ADTopK(density=0.03), x.flatten(), ADTopK().init(unit), Step(0, unit))
    assert (adtopk.view(40, 100) != 0).sum(dim=1).tolist() == [3] * 40
    (flat,) = simulate([make("topk(density=0.03)").exchange(x.flatten().clone(), {}, Step(0, unit))])
    assert ((flat.mean.view(40, 100) != 0).sum(dim=1) == 0).sum() > 20, "top-k must miss rows here, or nothing is shown"


def test_convolutions_are_seen_as_out_by_the_rest() -> None:
    unit = _unit((64, 32, 3, 3))
    assert ADTopK(density=0.01).selected_elems(unit) == 64 * 2
    assert ADTopK(density=0.01).selected_elems(unit) <= 0.01 * unit.numel


def test_phases_alternate_and_begin_with_rows() -> None:
    unit, compressor = _unit((8, 50)), ADTopK(density=0.04)
    state = compressor.init(unit)
    for index in range(4):
        x = _noise(unit, index).view(8, 50) * torch.logspace(0, -3, 8)[:, None]
        mean, state = _alone(compressor, x.flatten(), state, Step(index, unit))
        (topk,) = simulate([make("topk(density=0.04)").exchange(x.flatten().clone(), {}, Step(index, unit))])
        per_row = (mean.view(8, 50) != 0).sum(dim=1).tolist()
        assert (per_row == [2] * 8) == (index % 2 == 0)
        assert torch.equal(mean, topk.mean) == (index % 2 == 1)


def test_tensors_with_other_call_counts_share_a_unit() -> None:
    """A tensor that no rank has used keeps its count: then one unit has both phases, and each tensor its own result."""
    unit, compressor = _unit((6, 40), (5, 30), (7, 20)), ADTopK(density=0.1)
    state = compressor.init(unit)
    state["calls"] = torch.tensor([0, 1, 4])
    x = _noise(unit)
    mean, after = _alone(compressor, x, state, Step(3, unit))
    for i, part in enumerate(x.split(unit.sizes)):
        single = UnitSpec((unit.tensors[i],))
        own = {key: value[i : i + 1] for key, value in state.items()}
        expected, own_after = _alone(compressor, part, own, Step(3, single))
        assert torch.equal(mean.split(unit.sizes)[i], expected)
        assert {key: value[i].item() for key, value in after.items()} == {k: v.item() for k, v in own_after.items()}


@pytest.mark.parametrize("planned_steps", [0, 70])
def test_a_long_run_agrees_and_loses_nothing(planned_steps: int) -> None:
    """Long enough for thresholds to be reused, found anew by each rank in its own time, and judged stable."""
    unit, world = _unit((16, 64), (9, 33)), 3
    compressor = prepare(ADTopK(density=0.02, reuse=True, planned_steps=planned_steps)).inner  # type: ignore[attr-defined]
    gradients = [[_noise(unit, step, rank) * (1 + rank) for rank in range(world)] for step in range(80)]
    rounds = run_unit(compressor, unit, gradients)
    given = torch.stack([torch.stack(one) for one in gradients]).sum(dim=0).mean(dim=0)
    kept = torch.stack([result.state["residual"] for result in rounds[-1].results]).mean(dim=0)
    sent = torch.stack([done.results[0].mean for done in rounds]).sum(dim=0)
    assert torch.allclose(given - kept, sent, atol=1e-3)
    for done in rounds:
        for result in done.results[1:]:
            assert torch.equal(result.mean, done.results[0].mean)
            assert torch.equal(result.state["stable"], done.results[0].state["stable"])
    sizes = {tuple(done.sent_bytes) for done in rounds[31::2]}
    assert len(sizes) > 5, "reused thresholds let through varying numbers"
    waits = [tuple(result.state["wait"].tolist()) for result in rounds[-1].results]
    assert len(set(waits)) > 1, "each rank finds its thresholds in its own time"


def test_stable_tensors_stay_with_the_rows_at_the_end() -> None:
    unit, compressor = _unit((8, 50), (8, 50)), ADTopK(density=0.04, planned_steps=100)
    state = compressor.init(unit)
    state["calls"][:], state["stable"][0] = 75, True
    mean, _ = _alone(compressor, _noise(unit), state, Step(75, unit))
    by_rows = [(part.view(8, 50) != 0).sum(dim=1).tolist() == [2] * 8 for part in mean.split(unit.sizes)]
    assert by_rows == [True, False]
    state["calls"][:] = 73
    mean, _ = _alone(compressor, _noise(unit), state, Step(73, unit))
    assert (mean.view(-1, 50) != 0).sum(dim=1).tolist() != [2] * 16, "before the last quarter all alternate"


@pytest.mark.parametrize("reuse", [True, False])
def test_one_rank_can_veto_stability(reuse: bool) -> None:
    unit, compressor = _unit((8, 50)), ADTopK(density=0.04, reuse=reuse, planned_steps=1000)
    states = [compressor.init(unit) for _ in range(2)]
    for state, threshold in zip(states, (2.0, 20.0), strict=True):
        state["calls"][:], state["threshold"][:], state["stable"][:] = 41, threshold, True
    x = torch.linspace(-2.2, 2.2, unit.numel)  # the 16th largest magnitude is about 2.1
    steps = [Step(41, unit, rank, 2) for rank in range(2)]
    done = simulate([compressor.exchange(x.clone(), state, step) for state, step in zip(states, steps, strict=True)])
    assert [result.state["stable"].tolist() for result in done] == [[False], [False]]
    both = simulate([compressor.exchange(x.clone(), states[0], step) for step in steps])
    assert [result.state["stable"].tolist() for result in both] == [[True], [True]]


@pytest.mark.parametrize(
    ("found", "period"), [(1.04, 12), (1.07, 11), (1.15, 9), (1.3, 8), (0.96, 12), (0.93, 11), (0.85, 9), (0.7, 8)]
)
def test_period_follows_the_threshold(found: float, period: int) -> None:
    unit = _unit((1, 4))
    state = {"threshold": torch.tensor([1.0]), "period": torch.tensor([10]), "wait": torch.tensor([0])}
    x = torch.tensor([0.1, found, 5.0, 0.2])
    chosen, after, told = threshold_reuse.select(x, unit, [2], state, torch.tensor([20]))
    assert chosen.indices.tolist() == [1, 2]
    assert after["threshold"].item() == pytest.approx(found)
    assert (after["period"].item(), after["wait"].item()) == (period, period - 1)
    assert told.item() == (abs(found - 1) < 0.1)


def test_period_never_falls_below_five() -> None:
    state = {"threshold": torch.tensor([1.0]), "period": torch.tensor([5]), "wait": torch.tensor([0])}
    _, after, _ = threshold_reuse.select(torch.tensor([9.0, 8.0]), _unit((1, 2)), [1], state, torch.tensor([15]))
    assert after["period"].item() == 5


def test_first_calls_are_exact_then_the_threshold_decides() -> None:
    unit, state = (
        _unit((1, 4)),
        {"threshold": torch.tensor([1.5]), "period": torch.tensor([5]), "wait": torch.tensor([3])},
    )
    x = torch.tensor([1.0, -2.0, 3.0, 2.5])
    early, _, _ = threshold_reuse.select(x.clone(), unit, [2], state, torch.tensor([14]))
    assert early.indices.tolist() == [2, 3]
    later, after, told = threshold_reuse.select(x.clone(), unit, [2], state, torch.tensor([15]))
    assert later.indices.tolist() == [1, 2, 3]
    assert later.residual.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert (after["wait"].item(), after["threshold"].item(), told.item()) == (2, 1.5, -1)


def test_a_threshold_that_is_far_too_low_does_not_send_everything() -> None:
    unit = _unit((1, 100), (1, 10))
    state = {"threshold": torch.tensor([0.0, 0.5]), "period": torch.tensor([5, 5]), "wait": torch.tensor([3, 3])}
    x = torch.cat([torch.arange(1.0, 101.0), torch.tensor([1.0] * 3 + [0.1] * 7)])
    chosen, _, _ = threshold_reuse.select(x.clone(), unit, [5, 2], state, torch.tensor([20, 20]))
    assert chosen.counts == (5, 3)
    assert chosen.indices.tolist() == [95, 96, 97, 98, 99, 100, 101, 102]
    restored = chosen.residual.clone()
    restored[chosen.indices.long()] += chosen.values
    assert torch.equal(restored, x)


def test_price_is_the_average_of_the_phases() -> None:
    unit, compressor = _unit((16, 200), (9, 300)), ADTopK(density=0.03)
    rounds = run_unit(compressor, unit, [[_noise(unit, i)] * 2 for i in range(2)])
    assert sum(done.sent_bytes[0] for done in rounds) in (2 * compressor.wire_bytes(unit, 2) + odd for odd in (0, 1))


def test_positions_take_one_byte_in_short_rows_and_two_in_long_ones() -> None:
    unit, compressor = _unit((16, 256), (9, 257)), ADTopK(density=0.02)
    payload = compressor.encode(_noise(unit), Step(0, unit))
    assert (payload["byte"].numel(), payload["word"].numel()) == (16 * 5, 2 * 9 * 5)
    long = _unit((2, 70_000))
    assert "byte" not in compressor.encode(_noise(long), Step(0, long))


def test_damaged_positions_are_refused() -> None:
    unit, compressor = _unit((4, 100)), ADTopK(density=0.02)
    payload = compressor.encode(_noise(unit), Step(0, unit))
    with pytest.raises(ValueError, match="out of order or outside"):
        compressor.decode(Payload({**payload, "byte": torch.full_like(payload["byte"], 100)}), unit)
    with pytest.raises(ValueError, match="does not fit rows"):
        compressor.decode(Payload({"values": payload["values"], "bytes": payload["byte"]}), unit)


def test_vectors_stay_dense() -> None:
    prepared = prepare("adtopk")
    assert isinstance(prepared.route(TensorSpec("bias", (5000,))), Dense)
    assert isinstance(make("adtopk").route(TensorSpec("bias", (5000,))), Dense)
    assert prepared.route(TensorSpec("weight", (50, 100))).sparse


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        ("adtopk(density=0)", "density is 0"),
        ("adtopk(planned_steps=-1)", "planned_steps is -1"),
        ("adtopk(reuse=True) | int4", "leave out reuse"),
    ],
)
def test_mistakes_are_answered(spec: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        make(spec)
