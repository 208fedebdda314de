"""A small network that learns which layers are worth their bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from contract.world import World, run_unit
from thinwire.core import TensorSpec, UnitSpec, make
from thinwire.wrappers import gate_network as network
from thinwire.wrappers.gate_network import EMBEDDING, FEATURES, NETWORK, ROW, Situation, adam, gates, gradients

TENSORS = tuple(TensorSpec(f"block{i}.weight", (8, 8)) for i in range(5))
UNIT = UnitSpec(TENSORS)
SPEC = "hypernet(budget=0.4, warmup=0, always_bytes=0, merge_bytes=0) | ef | topk(density=0.25)"


def _situation(layers: int = 5) -> Situation:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(layers, FEATURES, generator=generator, dtype=torch.float64)
    usefulness = torch.zeros(layers, dtype=torch.float64)
    usefulness[2] = 1
    shares = torch.full((layers,), 1 / layers, dtype=torch.float64)
    waited = torch.linspace(0, 1, layers, dtype=torch.float64)
    return Situation(features, usefulness, shares, waited, budget=0.4)


def _start(layers: int = 5) -> tuple[Tensor, Tensor]:
    rows = torch.stack([network.initial_row(f"layer{i}") for i in range(layers)]).double()
    return rows[0, :NETWORK], rows[:, NETWORK:]


def _gradients(steps: int, world_size: int = 2) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(UNIT.numel, generator=generator) for _ in range(world_size)] for _ in range(steps)]


def test_written_gradient_is_that_of_autograd() -> None:
    situation, (weights, embeddings) = _situation(), _start()
    p, by_weights, by_embeddings = gradients(weights, embeddings, situation)
    weights, embeddings = (one.clone().requires_grad_() for one in (weights, embeddings))
    again = gates(weights, embeddings, situation.features)
    expected = torch.autograd.grad(situation.objective(again), (weights, embeddings))
    torch.testing.assert_close(p, again.detach())
    torch.testing.assert_close(by_weights, expected[0])
    torch.testing.assert_close(by_embeddings, expected[1])


def test_adam_is_that_of_torch() -> None:
    weights = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameter = weights.clone().requires_grad_()
    optimizer = torch.optim.Adam([parameter], lr=3e-3)
    first = second = torch.zeros_like(weights)
    for steps in range(4):
        parameter.grad = parameter.detach().cos()
        weights, first, second = adam(weights, weights.cos(), first, second, steps)
        optimizer.step()
    torch.testing.assert_close(weights, parameter.detach())


def test_it_learns_the_useful_layer_within_the_budget() -> None:
    situation, (weights, embeddings) = _situation(), _start()
    moments = [torch.zeros_like(one) for one in (weights, weights, embeddings, embeddings)]
    before = situation.objective(gates(weights, embeddings, situation.features))
    for steps in range(400):
        _, by_weights, by_embeddings = gradients(weights, embeddings, situation)
        weights, *moments[:2] = adam(weights, by_weights, *moments[:2], steps)
        embeddings, *moments[2:] = adam(embeddings, by_embeddings, *moments[2:], steps)
    p = gates(weights, embeddings, situation.features)
    assert situation.objective(p) < before
    assert int(p.argmax()) == 2
    assert abs(float((p * situation.shares).sum()) - 0.4) < 0.2


def test_size_is_that_of_the_specification() -> None:
    assert 1000 <= NETWORK + 60 * EMBEDDING <= 3000
    assert ROW * 3 * 4 <= 7 * 1024 + 512


def test_bytes_keep_to_the_budget_and_the_network_is_trained() -> None:
    rounds = run_unit(make(SPEC), UNIT, _gradients(61))
    sent = sum(done.sent_bytes[0] for done in rounds[1:]) / 60
    assert 0.9 <= sent / make(SPEC).wire_bytes(UNIT, 2) <= 1.1
    state = rounds[-1].results[0].state
    assert state["net_steps"].tolist() == [61] * 5
    assert not torch.equal(state["net_weight"], rounds[0].before[0]["net_weight"])
    rows = state["net_weight"].view(-1, ROW)
    assert all(torch.equal(row[:NETWORK], rows[0, :NETWORK]) for row in rows)
    assert not torch.equal(rows[0, NETWORK:], rows[1, NETWORK:])


def test_no_layer_waits_longer_than_max_age() -> None:
    rounds = run_unit(make(SPEC), UNIT, _gradients(60))
    assert max(int(done.results[0].state["layer_age"].max()) for done in rounds) <= 8


def test_ranks_agree_on_layers_and_network() -> None:
    for done in run_unit(make(SPEC), UNIT, _gradients(20, world_size=3)):
        first, *others = (result.state for result in done.results)
        for key in ("layer_picked", "net_weight", "net_second", "layer_mean"):
            assert all(torch.equal(other[key], first[key]) for other in others), key


def test_after_regrouping_the_longest_trained_network_is_taken() -> None:
    world = World(TENSORS, make(SPEC), 2)
    flat = _gradients(6)
    by_name = [[dict(zip((t.fqn for t in TENSORS), x.split(UNIT.sizes), strict=True)) for x in ranks] for ranks in flat]
    early, late, whole = world.group(TENSORS[:2]), world.group(TENSORS[2:]), world.group(TENSORS)
    for step in range(2):
        world.step([late], by_name[step])
    world.step([early], by_name[2])
    world.step([whole], by_name[3])
    state = world.at_rest[0]
    assert [int(state[tensor.fqn]["net_steps"]) for tensor in TENSORS] == [3] * 5
