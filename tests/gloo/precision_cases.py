"""Cases: precision on four real processes. A case returns what must be the same on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from gloo.support import Case, Rank, digest, seeded, wrap
from thinwire.amp import layer_scaler
from thinwire.formats import with_amax

CASES: dict[str, Case] = {}
NUMEL, SIGMA = 40_000, 1e-6


def case(body: Case) -> Case:
    CASES[body.__name__] = body
    return body


class Linear(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(200, NUMEL // 200))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def small_gradient(rank: int) -> Tensor:
    return torch.randn(200, NUMEL // 200, generator=torch.Generator().manual_seed(rank)) * SIGMA


def gradient_of(model: nn.Module, parameter: nn.Parameter, x: Tensor) -> Tensor:
    model.zero_grad()
    model(x).backward()
    assert parameter.grad is not None
    return parameter.grad.clone()


def off(got: Tensor, world_size: int) -> float:
    true = torch.stack([small_gradient(r) for r in range(world_size)]).double().mean(dim=0)
    return float((got - true).norm() / true.norm())


@case
def torchs_fp16_hook_loses_small_gradients(rank: Rank) -> str:
    model = DistributedDataParallel(Linear())
    model.register_comm_hook(None, fp16_compress_hook)
    got = gradient_of(model, model.module.weight, small_gradient(rank.index))
    assert float((got == 0).float().mean()) > 0.03
    assert off(got, rank.world_size) > 0.05
    return digest({"got": got})


@case
def thinwires_fp16_loses_none(rank: Rank) -> str:
    for engine in ("plain", "ddp"):
        model = wrap(engine, Linear())
        with thinwire.attach(model, compress="fp16"):
            got = gradient_of(model, next(model.parameters()), small_gradient(rank.index))  # type: ignore[arg-type]
        assert not (got == 0).any()
        assert off(got, rank.world_size) <= 2.2e-4
    return digest({"got": got})


def agreed_scales(text: str, tolerance: float) -> Case:
    def body(rank: Rank) -> str:
        model = Linear()
        with thinwire.attach(model, compress=text) as wire:
            for factor in (1.0, 1e3, 1e3, 1e1):  # the second step outgrows the scale of the first
                got = gradient_of(model, model.weight, small_gradient(rank.index) * factor) / factor
                assert off(got, rank.world_size) <= tolerance, factor
            state = wire.state_dict()["tensors"]["weight"]
            assert state["saturated"].tolist() == [1]
        return digest({"got": got, **state})

    return body


CASES["agreed fp16"] = agreed_scales("fp16(scale='agreed')", 1e-3)
CASES["agreed fp8"] = agreed_scales("fp8(scale='agreed')", 0.08)


class Deep(nn.Module):
    """Without normalisation: the gradients of the first layers vanish in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(16) for part in (nn.Linear(32, 32), nn.GELU())))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(x))
        return logits


def data(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(64, 32, generator=generator), torch.randint(0, 4, (64,), generator=generator)


def loss_of(model: nn.Module, rank: int, half: bool) -> Tensor:
    x, labels = data(rank)
    with torch.autocast("cpu", torch.float16, enabled=half):
        logits = model(x)
    return F.cross_entropy(logits.float(), labels)


def layer_scaler_on(engine: str) -> Case:
    def body(rank: Rank) -> str:
        exact = seeded(Deep)
        torch.stack([loss_of(exact, r, half=False) for r in range(rank.world_size)]).mean().backward()
        model = wrap(engine, seeded(Deep))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = layer_scaler(model)
        wire = thinwire.attach(model, optimizer, compress="fp16", scaler=scaler) if engine != "stock" else None
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank.index, half=True)).backward()
            scaler.unscale_(optimizer)
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            scaler.step(optimizer)
            scaler.update()
        for (name, parameter), got in zip(exact.named_parameters(), gradients, strict=True):
            assert parameter.grad is not None
            assert float((got - parameter.grad).norm() / parameter.grad.norm()) <= 0.02, name
        scales = scaler.layer_scales()
        assert scales["layers.0"] > 16 * scales["head"], "nothing was scaled: the case tests nothing"
        if wire is not None:
            wire.detach()
        return digest({**scales, **scaler.amax_table(), "gradients": {str(i): g for i, g in enumerate(gradients)}})

    return body


for _engine in ("plain", "ddp"):
    CASES[f"layer scaler [{_engine}]"] = layer_scaler_on(_engine)


@case
def an_amax_table_seeds_the_wire(rank: Rank) -> str:
    """With magnitudes known beforehand, the first step that is no step of measurement needs none either."""
    model = Linear()
    with thinwire.attach(model, compress="fp16(scale='agreed', refresh=1000)") as wire:
        largest = max(float(small_gradient(r).abs().max()) for r in range(rank.world_size))
        state = wire.state_dict()
        wire.load_state_dict({**with_amax(state, {"weight": largest}), "step": 1})
        got = gradient_of(model, model.weight, small_gradient(rank.index))
        assert off(got, rank.world_size) <= 1e-3
        after = wire.state_dict()["tensors"]["weight"]
        assert after["amax"].tolist() == [torch.tensor(largest).item()]
        assert after["saturated"].tolist() == [0]
    dist.barrier()
    return digest({"got": got})
