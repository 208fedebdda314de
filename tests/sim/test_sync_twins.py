"""Policies against slow, obvious twins that simulate all workers in one loop, as the papers write them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sim.sync_world import Worker, loss_of, model_of, on_ranks
from thinwire.sync.adacomm import AdaComm
from thinwire.sync.layerwise import Layerwise
from thinwire.sync.local_steps import Round
from thinwire.sync.momentum_k import MomentumK
from thinwire.sync.sapus import SaPus

WORLD, LR = 3, 0.1


class Twin:
    """All workers, with weights as one vector each."""

    def __init__(self) -> None:
        self.models = [model_of() for _ in range(WORLD)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in self.models]
        self.step = 0

    def local_step(self) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, self.step).backward()
            optimizer.step()
        self.step += 1

    def get(self, rank: int) -> Tensor:
        return nn.utils.parameters_to_vector(self.models[rank].parameters()).detach().clone()

    def put(self, rank: int, values: Tensor) -> None:
        nn.utils.vector_to_parameters(values.clone(), self.models[rank].parameters())  # which become views of it

    def all(self) -> Tensor:
        return torch.stack([self.get(rank) for rank in range(WORLD)])


def stream(slices: int, delay: int, steps: int) -> Tensor:
    """Section 0 of the specification, without compression."""
    twin = Twin()
    anchor = twin.get(0)
    total = anchor.numel() + sum(buffer.numel() for buffer in twin.models[0].buffers() if buffer.is_floating_point())
    bounds = [min(total * f // slices, anchor.numel()) for f in range(slices + 1)]  # statistics come last
    flying: list[tuple[int, slice, Tensor]] = []
    for step in range(1, steps + 1):
        twin.local_step()
        if flying and flying[0][0] == step - delay:
            _, where, snapshot = flying.pop(0)
            new = anchor[where] + (snapshot - anchor[where]).mean(dim=0)
            for rank in range(WORLD):
                weights = twin.get(rank)
                weights[where] += new - snapshot[rank]
                twin.put(rank, weights)
            anchor[where] = new
        f = (step + 1) % slices
        where = slice(bounds[f], bounds[f + 1])
        flying.append((step, where, twin.all()[:, where].clone()))
    return twin.all()


def periodic(h: int, steps: int, outer: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Average every h steps; ``outer`` makes the new weights of the old ones and the mean."""
    twin = Twin()
    anchor = twin.get(0)
    for step in range(1, steps + 1):
        twin.local_step()
        if step % h == 0:
            anchor = outer(anchor, twin.all().mean(dim=0))
            for rank in range(WORLD):
                twin.put(rank, anchor)
    return twin.all()


def diloco(h: int, steps: int) -> Tensor:
    """With torch's own Nesterov as the outer optimizer."""
    weights = nn.Parameter(Twin().get(0))
    optimizer = torch.optim.SGD([weights], lr=0.7, momentum=0.9, nesterov=True)

    def outer(anchor: Tensor, mean: Tensor) -> Tensor:
        weights.grad = anchor - mean
        optimizer.step()
        return weights.detach().clone()

    return periodic(h, steps, outer)


def slowmo(h: int, steps: int) -> Tensor:
    momentum = torch.zeros(())

    def outer(anchor: Tensor, mean: Tensor) -> Tensor:
        nonlocal momentum
        momentum = 0.5 * momentum + (anchor - mean) / LR
        return anchor - LR * momentum

    return periodic(h, steps, outer)


TWINS: dict[str, Callable[[], Tensor]] = {
    "stream(slices=1, compress='dense', lr_scale=1.0)": lambda: stream(1, 1, 9),
    "stream(slices=2, compress='dense', lr_scale=1.0)": lambda: stream(2, 1, 9),
    "stream(slices=3, delay=2, compress='dense', lr_scale=1.0)": lambda: stream(3, 2, 9),
    "local(h=3)": lambda: periodic(3, 9, lambda _, mean: mean),
    "diloco(h=2)": lambda: diloco(2, 9),
    "slowmo(h=2)": lambda: slowmo(2, 9),
    "sparseloco(h=2, compress='dense')": lambda: periodic(2, 9, lambda old, mean: old + 0.4 * (mean - old)),
    "sparta(density=1.0, delay=0)": lambda: periodic(1, 9, lambda _, mean: mean),
}


@pytest.mark.parametrize("spec", TWINS)
def test_a_policy_is_what_its_paper_says(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.sync.pieces._BLOCK", 1)  # slices exactly as specified
    expected = TWINS[spec]()

    def work(one: Worker) -> Any:
        one.train(9)
        return nn.utils.parameters_to_vector(one.model.parameters()).detach()

    got = torch.stack(on_ranks(work, spec, WORLD, lr=LR, optimizer=torch.optim.SGD))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    start = nn.utils.parameters_to_vector(model_of().parameters())
    assert float((expected - start).abs().mean()) > 1000 * float((got - expected).abs().mean())


def test_streaming_diloco_sends_fragments_in_turn_and_mixes() -> None:
    def work(one: Worker) -> Any:
        seen = []
        for _ in range(10):
            one.train(1)
            seen.append(sorted(flight["fragment"] for flight in one.wire.state_dict()["sync"]["deltas"]["flights"]))
        return seen

    expected = [[], [], [], [0], [], [1], [], [0], [], [1]]
    assert on_ranks(work, "streaming_diloco(h=4, fragments=2)") == [expected, expected]


def round_of(**given: Any) -> Round:
    return Round(**{"step": 1, "fragment": 0, "interval": 1, "scalars": {}, "mean_square": 0.0, **given})


def test_adacomm_follows_the_loss() -> None:
    policy = AdaComm(h=16, every=1)
    numbers = policy.begin()
    taken = []
    for loss, lr in [(4.0, 0.1), (2.0, 0.1), (1.0, 0.1), (1.0, 0.1), (1.0, 0.4), (9.0, 0.1)]:
        policy.adapt(numbers, round_of(scalars={"loss": [loss, loss], "lr": [lr, lr]}))
        taken.append(numbers["interval"])
    # ceil(16·sqrt(F/F0·lr0/lr)), or half of the last one where that is no less.
    assert taken == [8, 4, 2, 1, 1, 1]
    slow = AdaComm(h=100, every=1)
    numbers = slow.begin()
    slow.adapt(numbers, round_of(scalars={"loss": [4.0], "lr": [0.1]}))
    numbers["interval"] = 100
    slow.adapt(numbers, round_of(scalars={"loss": [1.0], "lr": [0.1]}))
    assert numbers["interval"] == 50


def test_momentum_k_lengthens_where_noise_wins() -> None:
    policy = MomentumK(h=4, longest=6)
    noisy, clean = policy.begin(), policy.begin()
    for _ in range(4):
        policy.adapt(noisy, round_of(scalars={"square": [1.0] * 4}, mean_square=0.26))
        policy.adapt(clean, round_of(scalars={"square": [1.0] * 4}, mean_square=0.95))
    assert noisy["interval"] == 6, "limited by longest"
    assert clean["interval"] == 1


def test_layers_that_hardly_differ_are_averaged_more_rarely() -> None:
    policy = Layerwise(h=2, stretch=3, layers=4)
    numbers = policy.begin()
    for layer, spread in enumerate([8.0, 0.1, 0.2, 4.0]):
        policy.adapt(numbers, round_of(step=6, fragment=layer, scalars={"square": [1.0 + spread] * 2}, mean_square=1.0))
    assert [numbers[f"stretch{layer}"] for layer in range(4)] == [1, 3, 3, 1]
    assert policy.due(2, numbers) == [0, 3]
    assert policy.due(6, numbers) == [0, 1, 2, 3]


def test_sapus_weighs_ranks_and_follows_loss_and_seconds() -> None:
    policy = SaPus(h=8)
    fast = {"lr": [0.1] * 2, "step_s": [1.0, 1.0], "exchange_s": [0.1, 0.2]}
    numbers = policy.begin()
    policy.adapt(numbers, round_of(scalars={"loss": [1.0, 3.0], **fast}))
    assert policy.weight(numbers, 2.0) == 1.0
    assert policy.weight(numbers, 1.0) == pytest.approx(math.exp(0.25))
    assert policy.weight(numbers, 100.0) == 0.5
    slow = copy.deepcopy(numbers)
    policy.adapt(slow, round_of(scalars={"loss": [2.0, 2.0], **fast, "exchange_s": [1.0, 9.0]}))
    assert slow["interval"] == 2 * numbers["interval"], "at most doubled at once"
    policy.adapt(numbers, round_of(scalars={"loss": [0.1, 0.1], **fast}))
    assert numbers["interval"] == 4, "at most halved at once"
