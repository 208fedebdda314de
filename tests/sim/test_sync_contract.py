"""Laws of every policy with local steps, over ranks that are threads: agreement, conservation, save-load-continue."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from sim.sync_world import Tiny, Worker, loss_of, model_of, on_ranks
from thinwire.sync import policies
from thinwire.sync.deltas import WEIGHT, Deltas, Landed

# One or two settings each, quick enough to average several times in 13 steps. ``share``: seconds must not decide here.
SPECS = [
    "stream",
    "stream(bits=1, slices=3)",
    "stream(bits=4, slices=3, delay=2, start=2)",
    "stream(compress='stk(density=0.1)')",
    "local(h=3)",
    "local(h=3, delay=2, compress='int4')",
    "post_local(h=2, start=3)",
    "slowmo(h=3)",
    "adacomm(h=4, every=1)",
    "diloco(h=3)",
    "streaming_diloco(h=4, fragments=3)",
    "sparseloco(h=3)",
    "sparta(density=0.1)",
    "layerwise(h=2, stretch=2, layers=3)",
    "sapus(h=2, share=1e9)",
    "momentum_k(h=2)",
]
SAVED_AFTER, STEPS = 7, 13


def bits(value: Any) -> Any:
    """Everything with tensors as bytes, to be compared bit for bit."""
    if isinstance(value, Tensor):
        return value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    return [bits(one) for one in value] if isinstance(value, list | tuple) else value


def test_every_policy_is_here() -> None:
    assert {spec.partition("(")[0] for spec in SPECS} == set(policies()) - {"every_step"}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_agreement(spec: str, world_size: int) -> None:
    """Anchors, momenta and the numbers of adaptive policies are the same on all ranks, to the last bit."""

    def work(one: Worker) -> Any:
        one.train(STEPS)
        return one.wire.state_dict()["sync"]

    states = on_ranks(work, spec, world_size)
    start = dict(model_of().named_parameters())
    for key in ("memory", "numbers", "step"):
        assert all(bits(state[key]) == bits(states[0][key]) for state in states), key
    anchors = [state["deltas"]["anchor"] for state in states]
    assert all(bits(anchor) == bits(anchors[0]) for anchor in anchors)
    assert all(not torch.equal(anchors[0][name], start[name].flatten()) for name in start), "it has not moved"


@pytest.mark.parametrize(
    "spec", ["local(h=3)", "diloco(h=3)", "slowmo(h=3)", "sapus(h=3, share=1e9)", "layerwise(h=3)"]
)
def test_replicas_are_equal_after_an_average_that_is_waited_for(spec: str) -> None:
    def work(one: Worker) -> Any:
        one.train(2)
        before = bits(dict(one.model.named_parameters()))
        one.train(1)
        return before, bits(dict(one.model.named_parameters()))

    (before, after), (others_before, others_after) = on_ranks(work, spec)
    assert before != others_before
    assert after == others_after


@pytest.mark.parametrize("spec", SPECS)
def test_the_loss_falls(spec: str) -> None:
    def work(one: Worker) -> Any:
        one.train(80)
        return one.losses

    # Outer momentum multiplies the rate (by 7 in DiLoCo), and 1.6 % of a small model is little per average.
    factor, lr = {"diloco(h=3)": (0.5, 0.002), "slowmo(h=3)": (0.5, 0.004), "sparseloco(h=3)": (0.9, 0.01)}.get(
        spec, (0.5, 0.01)
    )
    for losses in on_ranks(work, spec, lr=lr):
        assert sum(losses[-5:]) < factor * sum(losses[:5])


@pytest.mark.parametrize(
    "spec", ["stream", "stream(bits=4)", "local(h=2, delay=1, compress='int4')", "local(h=3, compress='topk')"]
)
def test_conservation(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over each flight: mean of weight·(S - A) + residuals before = mean weight · mean delta + residuals after."""
    settle: Callable[[Deltas], Landed] = Deltas.settle
    recorded: dict[int, list[tuple[Any, ...]]] = {}

    def recording(deltas: Deltas) -> Landed:
        before, anchor = deltas.state_dict()["channel"]["tensors"], dict(deltas.anchor)
        landed = settle(deltas)
        names = {p.owner: p.name for p in deltas.fragments[landed.flight.leave.fragment]}
        sent = {
            o: landed.flight.leave.scalars[WEIGHT] * (landed.flight.snapshot[n] - anchor[n]) for o, n in names.items()
        }
        after = deltas.state_dict()["channel"]["tensors"]
        means = {owner: landed.means[name] for owner, name in names.items()}
        ranges = {p.owner: (p.start, p.end) for p in deltas.fragments[landed.flight.leave.fragment]}
        recorded.setdefault(id(deltas), []).append(
            (before, sent, after, means, landed.flight.leave.scalars[WEIGHT], ranges)
        )
        return landed

    monkeypatch.setattr(Deltas, "settle", recording)

    def work(one: Worker) -> None:
        for step in range(9):
            if step == 4 and one.rank == 1:  # ranks that count unequally
                one.wire.idle_step()
                one.step += 1
            else:
                one.train(1)

    on_ranks(work, spec)
    compared = 0
    for first, second in zip(*recorded.values(), strict=True):
        mean_weight = (first[4] + second[4]) / 2
        for owner, mean in first[3].items():
            start, end = first[5][owner]
            old, new = (
                sum(sum(one[when][owner].values(), torch.zeros(end))[start:end] for one in (first, second)) / 2
                for when in (0, 2)
            )
            sent = (first[1][owner] + second[1][owner]) / 2
            torch.testing.assert_close(sent + old, mean_weight * mean + new, rtol=1e-4, atol=1e-6)
            compared += int(new.any())
    assert compared > 2, "no residual was ever kept"


@pytest.mark.parametrize("spec", SPECS)
def test_save_load_continue_equals_uninterrupted(spec: str) -> None:
    def through(one: Worker) -> Any:
        one.train(SAVED_AFTER)
        saved = one.saved()
        one.train(STEPS - SAVED_AFTER)
        return saved, bits(one.saved())

    def resumed(one: Worker) -> Any:
        one.train(2)  # what is there is overwritten
        one.load(copy.deepcopy(saved[one.rank]))
        assert bits(one.saved()) == bits(saved[one.rank])
        one.train(STEPS - SAVED_AFTER)
        return bits(one.saved())

    saved, expected = zip(*on_ranks(through, spec), strict=True)
    flights = saved[0]["wire"]["sync"]["deltas"]["flights"]
    assert flights or "delay" not in spec, "saved with nothing under way"
    assert on_ranks(resumed, spec) == list(expected)


def broken(state: dict[str, Any], how: str) -> dict[str, Any]:
    state = copy.deepcopy(state)
    sync = state["sync"]
    match how:
        case "no sync":
            state["sync"] = None
        case "another policy":
            sync["policy"] = "local(h=99)"
        case "a tensor is missing":
            del sync["deltas"]["anchor"]["first.weight"]
        case "too short":
            sync["deltas"]["anchor"]["first.weight"] = sync["deltas"]["anchor"]["first.weight"][1:]
        case "not finite":
            sync["deltas"]["flights"][0]["snapshot"]["last.bias"][0] = float("nan")
        case "residual too short":
            sync["deltas"]["channel"]["tensors"]["first.weight"]["residual"] = torch.zeros(3)
        case "counter is text":
            sync["step"] = "seven"
        case "no such fragment":
            sync["deltas"]["flights"][0]["fragment"] = 7
    return state


@pytest.mark.parametrize(
    "how",
    ["no sync", "another policy", "a tensor is missing", "too short", "not finite", "residual too short",
     "counter is text", "no such fragment"],
)  # fmt: skip
def test_a_refused_state_has_changed_nothing(how: str) -> None:
    def work(one: Worker) -> None:
        one.train(6)
        before = one.wire.state_dict()
        with pytest.raises(thinwire.CheckpointError):
            one.wire.load_state_dict(broken(before, how))
        assert bits(one.wire.state_dict()) == bits(before)
        one.train(2)

    on_ranks(work, "stream(bits=4, slices=1)")


@pytest.mark.parametrize("spec", SPECS)
def test_one_rank_is_plain_training(spec: str) -> None:
    def work(one: Worker) -> Any:
        one.train(8)
        with one.wire.averaged(exact=True):
            return bits(one.model.state_dict())

    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        optimizer.step()
    assert on_ranks(work, spec, world_size=1) == [bits(model.state_dict())]


def test_the_model_has_what_the_laws_are_about() -> None:
    names = [name for name, _ in Tiny().named_buffers()]
    assert "norm.running_mean" in names
    assert any(p.numel() >= 1024 and p.dim() == 2 for p in Tiny().parameters()), "routing would leave all of it dense"
