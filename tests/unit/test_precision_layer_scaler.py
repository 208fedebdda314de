"""LayerScaler: gradients survive fp16 where GradScaler loses them, whatever the shape of the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thinwire
from thinwire.amp import LayerScaler
from thinwire.amp.layer_moments import LOST_FRACTION, Moments, fan, layer_range

Scaler = LayerScaler | torch.amp.GradScaler


def shrinking_cnn(layers: int = 16) -> nn.Sequential:
    """No normalisation and torch's default start values: gradients shrink by about 0.3 per layer."""
    body = [part for _ in range(layers) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.GELU())]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


class Residual(nn.Module):
    """A stream with branches whose gradients are far smaller than the stream's."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
            for _ in range(blocks)
        )
        self.last = nn.Linear(width, 10)
        for branch in self.branches:
            branch[3].weight.data.mul_(0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(2).mT)
        for branch in self.branches:
            x = x + branch(x)
        logits: Tensor = self.last(x.mean(dim=1))
        return logits


class Tangled(nn.Module):
    """One layer called twice, tied weights, an operation in place on a layer's output, and a tensor with three users."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(3, 10), nn.Linear(10, 10)
        self.tied = nn.Linear(10, 10, bias=False)
        self.tied.weight = self.twice.weight
        self.twice.weight.data.mul_(0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh_(self.first(images.flatten(2).mean(dim=2)))
        return self.twice(x) * x + self.twice(F.gelu(self.tied(x))) * 1e-2


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 10, (16,), generator=generator)


def loss_of(model: nn.Module, half: bool, seed: int = 0) -> Tensor:
    images, labels = data(seed)
    with torch.autocast("cpu", torch.float16, enabled=half):
        logits = model(images)
    return F.cross_entropy(logits.float(), labels)


def exact_gradients(model: nn.Module) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    loss_of(model, half=False).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def half_gradients(model: nn.Module, make: Callable[[nn.Module], Scaler], steps: int = 6) -> dict[str, Tensor]:
    """Gradients after a few steps that change nothing, so that scales have settled."""
    model = copy.deepcopy(model)
    scaler, optimizer = make(model), torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, half=True)).backward()
        scaler.unscale_(optimizer)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        scaler.step(optimizer)
        scaler.update()
    return gradients


def errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((got[name] - exact[name]).norm() / exact[name].norm()) for name in exact}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def test_keeps_what_grad_scaler_loses() -> None:
    model = seeded(shrinking_cnn)
    exact = exact_gradients(model)
    theirs = errors(half_gradients(model, lambda _: torch.amp.GradScaler("cpu")), exact)
    ours = errors(half_gradients(model, LayerScaler), exact)
    assert max(theirs.values()) > 0.3, "the network is no test: nothing underflows"
    assert max(ours.values()) <= 0.01, ours


@pytest.mark.parametrize("make", [shrinking_cnn, Residual, Tangled])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_layers_want_the_gradients_are_right(make: Callable[[], nn.Module], seed: int) -> None:
    """In fp32 powers of two cost no precision, so any factor that is not undone shows."""
    model = seeded(make)
    exact = exact_gradients(model)
    scaler = LayerScaler(model, init_scale=1.0)
    generator = torch.Generator().manual_seed(seed)
    layers = [name for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    wanted = (2 ** torch.randint(0, 20, (len(layers), 2), generator=generator).double()).tolist()
    ranges = {name: [[one, 1e30], [other, 1e30]] for name, (one, other) in zip(layers, wanted, strict=True)}
    scaler.load_state_dict({**scaler.state_dict(), "ranges": ranges, "settling": 0, "steps": 1})
    model.zero_grad()
    scaler.scale(loss_of(model, half=False)).backward()
    assert max(scaler.layer_scales().values()) >= 16, "no layer was scaled: the test tests nothing"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, exact[name], rtol=1e-4, atol=1e-5 * float(exact[name].abs().max()))


def test_small_branches_of_a_residual_network() -> None:
    model = seeded(Residual)
    exact = exact_gradients(model)
    ours = errors(half_gradients(model, lambda m: LayerScaler(m, init_scale=2.0**-10)), exact)
    theirs = errors(half_gradients(model, lambda _: torch.amp.GradScaler("cpu", init_scale=2.0**-10)), exact)
    inner = [name for name in exact if ".1." in name and name.endswith("weight")]
    assert min(theirs[name] for name in inner) > 0.05, "the network is no test: nothing underflows"
    assert max(ours[name] for name in inner) <= 0.01


def test_branches_are_scaled_and_the_stream_is_not_changed() -> None:
    model = seeded(Residual)
    scaler = LayerScaler(model, init_scale=2.0**4)
    for _ in range(4):
        scaler.scale(loss_of(model, half=True)).backward()
        scaler.update(2.0**4)
    scales = scaler.layer_scales()
    assert scales["branches.0.1"] > scales["branches.0.3"] >= scales["first"] >= 1


def test_all_scales_are_powers_of_two() -> None:
    scaler = LayerScaler(model := seeded(shrinking_cnn))
    for _ in range(3):
        scaler.scale(loss_of(model, half=True)).backward()
        scaler.update(2.0**16)
    assert {torch.tensor(s).frexp().mantissa.item() for s in scaler.layer_scales().values()} == {0.5}


def train(model: nn.Module, scaler: Scaler, steps: range) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, half=True, seed=step)).backward()
        scaler.step(optimizer)
        scaler.update()
    return optimizer


def test_resumes_exactly() -> None:
    straight, resumed = seeded(shrinking_cnn), seeded(shrinking_cnn)
    scaler = LayerScaler(straight, refresh=3)
    train(straight, scaler, range(8))

    before = LayerScaler(resumed, refresh=3)
    train(resumed, before, range(4))
    before.detach()
    after = LayerScaler(resumed, refresh=3)
    after.load_state_dict(before.state_dict())
    train(resumed, after, range(4, 8))

    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    assert after.state_dict() == scaler.state_dict()


def test_state_of_another_model_is_refused() -> None:
    scaler = LayerScaler(model := seeded(shrinking_cnn))
    train(model, scaler, range(1))
    with pytest.raises(thinwire.CheckpointError, match="which this model does not have"):
        LayerScaler(seeded(Residual)).load_state_dict(scaler.state_dict())


def test_an_overflow_skips_the_step_and_lowers_all_scales() -> None:
    scaler = LayerScaler(model := seeded(shrinking_cnn), growth_interval=10_000)
    train(model, scaler, range(4))
    before = {name: p.clone() for name, p in model.named_parameters()}
    total = scaler.get_scale() * max(scaler.layer_scales().values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(loss_of(model, half=True) * 1e30).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    scaler.scale(loss_of(model, half=True)).backward()
    assert scaler.get_scale() * max(scaler.layer_scales().values()) < total


def test_two_losses_that_share_a_part() -> None:
    """Scaled one after the other and added, or sent back one by one: the gradients are those of the sum."""
    model = seeded(shrinking_cnn)
    images, labels = data()

    def losses(half: bool) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.float16, enabled=half):
            features = model[:-1](images)
            return F.cross_entropy(model[-1](features).float(), labels), features.float().square().mean()

    torch.stack(losses(half=False)).sum().backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    scaler = LayerScaler(model)
    for apart in (False, True, False, True):
        model.zero_grad()
        one, other = losses(half=True)
        if apart:
            scaler.scale(one).backward(retain_graph=True)
            scaler.scale(other).backward()
        else:
            (scaler.scale(one) + scaler.scale(other)).backward()
        got = {name: p.grad / scaler.get_scale() for name, p in model.named_parameters() if p.grad is not None}
        scaler.update(scaler.get_scale())
    assert max(errors(got, exact).values()) <= 0.02


def test_accumulated_and_checkpointed_gradients() -> None:
    """Two half batches add up; activations that are computed again do not confuse the calls."""
    model = seeded(shrinking_cnn)
    exact = exact_gradients(model)
    scaler = LayerScaler(model)
    images, labels = data()
    for _ in range(4):
        model.zero_grad()
        for part in (slice(0, 8), slice(8, 16)):
            with torch.autocast("cpu", torch.float16):
                body = torch.utils.checkpoint.checkpoint(model[:10], images[part], use_reentrant=False)
                logits = model[10:](body)
            scaler.scale(F.cross_entropy(logits.float(), labels[part]) / 2).backward()
        got = {name: p.grad / scaler.get_scale() for name, p in model.named_parameters() if p.grad is not None}
        scaler.update(scaler.get_scale())
    assert max(errors(got, exact).values()) <= 0.02


def test_a_backward_pass_that_was_not_scaled_is_left_alone() -> None:
    model = seeded(shrinking_cnn)
    scaler = LayerScaler(model)
    train(model, scaler, range(3))
    exact = exact_gradients(model)
    model.zero_grad()
    loss_of(model, half=False).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, exact[name])


def test_only_layers_that_need_it_have_gates_between_measurements() -> None:
    model = seeded(shrinking_cnn)
    scaler = LayerScaler(model)
    for _ in range(6):
        scaler.scale(loss_of(model, half=True)).backward()
        scaler.update(2.0**16)
    gated: list[str] = []
    for name, layer in model.named_modules():
        layer.register_forward_hook(lambda m, i, out, name=name: gated.append(name) if out.grad_fn.metadata else None)
    loss_of(model, half=True)
    scales = sorted((int(name), scale) for name, scale in scaler.layer_scales().items())
    changes = {str(name) for (name, scale), (_, after) in pairwise(scales) if scale != after}
    assert set(gated) == changes
    assert 0 < len(changes) < len(scales)


def test_it_costs_nothing_where_nothing_is_needed() -> None:
    """Without a layer that needs it, and between measurements, no gate is put up."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    scaler = LayerScaler(model)
    for _ in range(4):
        scaler.scale(model(torch.ones(4, 8)).square().sum()).backward()
        scaler.update(2.0**16)
    output = model(torch.ones(4, 8))
    assert not output.grad_fn.metadata
    scaler.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_amax_table_holds_the_largest_gradients() -> None:
    model = seeded(shrinking_cnn)
    scaler = LayerScaler(model)
    for _ in range(3):
        scaler.scale(loss_of(model, half=True)).backward()
        scaler.update(2.0**16)
    exact = exact_gradients(model)
    assert set(scaler.amax_table()) == set(exact)
    for name, gradient in exact.items():
        assert scaler.amax_table()[name] == pytest.approx(float(gradient.abs().max()), rel=0.03)


def test_ranks_agree_through_reduce() -> None:
    """What ``reduce`` gives back is what counts: here it pretends that the others had gradients 2^10 times larger."""
    asked: list[tuple[str, tuple[int, ...]]] = []

    def reduce(tensor: Tensor, op: str) -> Tensor:
        asked.append((op, tuple(tensor.shape)))
        return tensor * (torch.tensor([2.0**20, 1, 1, 1]) if op == "sum" else 2.0**10)

    alone, among = (
        LayerScaler(model := seeded(shrinking_cnn)),
        LayerScaler(other := seeded(shrinking_cnn), reduce=reduce),
    )
    train(model, alone, range(2))
    train(other, among, range(2))
    assert asked[:3] == [("sum", (18, 4)), ("max", (18, 2)), ("max", (36,))]
    assert max(among.layer_scales().values()) < max(alone.layer_scales().values())


@pytest.mark.parametrize(
    ("layer", "expected"),
    [(nn.Linear(3, 7), 7), (nn.Conv2d(4, 6, 3), 54), (nn.Conv2d(4, 6, (3, 5), groups=2), 45), (nn.Conv1d(2, 4, 3), 12)],
)
def test_fan(layer: Any, expected: int) -> None:
    assert fan(layer) == expected


def test_needed_scale_loses_the_stated_fraction() -> None:
    """At the needed scale, a thousandth of the (normal) input gradients are below the smallest fp16 number."""
    layer = nn.Linear(512, 256, bias=False)
    nn.init.normal_(layer.weight, std=0.05)
    g = torch.randn(2000, 256) * 1e-9 * (torch.rand(2000, 256) < 0.5)  # half of them zero, as behind a ReLU
    g = g * (2**0.5)  # the formula's F/2 takes rms(g) to be that of the ones that count
    moments = Moments(float(g.square().sum()), g.numel(), g_amax=float(g.abs().max()))
    need = layer_range(layer, moments).made.need
    entries = (g @ layer.weight.detach()).double() * need
    lost = float((entries.abs() < 2.0**-24).double().mean())
    assert LOST_FRACTION / 2 <= lost <= LOST_FRACTION * 2


def test_models_that_cannot_be_scaled_are_refused() -> None:
    with pytest.raises(thinwire.ConfigError, match="no linear or convolution layer"):
        LayerScaler(nn.LayerNorm(3))
    with pytest.raises(thinwire.ConfigError, match=r"weight of 0 is torch.float16"):
        LayerScaler(nn.Sequential(nn.Linear(2, 2).half()))
    with pytest.raises(thinwire.ConfigError, match="at least 1"):
        LayerScaler(nn.Linear(2, 2), refresh=0)


def test_disabled_changes_nothing() -> None:
    model = seeded(shrinking_cnn)
    scaler = LayerScaler(model, enabled=False)
    loss = loss_of(model, half=False)
    assert scaler.scale(loss) is loss
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0
