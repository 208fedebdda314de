"""Profile a model by running a few real steps of it on one rank, without changing it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core import ConfigError, TensorSpec
from thinwire.fusion import ModelProfile
from thinwire.fusion.profile import WARMUP_STEPS
from thinwire.plan.codecs import relative_error
from thinwire.plan.noise import measure_noise, samples

STEPS = 5

Loss = Callable[[nn.Module, Any], Tensor]


class _Times:
    """When things happened in one step."""

    def __init__(self) -> None:
        self.forward_s = self.backward_s = self.optimizer_s = 0.0
        self.ready_s: dict[str, float] = {}


def profile_model(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    *,
    specs: Sequence[str] = (),
    steps: int = STEPS,
    slowdown: float = 1.0,
) -> ModelProfile:
    """Run ``steps`` steps (after two to warm up) and condense them.

    Parameters, buffers, gradients and the random state are as before afterwards. The optimizer's time is that of AdamW
    with a learning rate of zero.

    Args:
        batch: what one rank computes in one step: a tensor, or a tuple, list or dict of them, samples along the first axis.
        loss: ``loss(model, batch)``; default: ``default_loss``.
        specs: compressors whose error on this model's gradients is wanted.
        slowdown: of the cluster (``Cluster.slowdown``) while this runs.

    Raises:
        ConfigError: nothing to train, or a loss that is no scalar.
    """
    loss = loss or default_loss
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not names or steps < 1:
        raise ConfigError(f"{len(names)} trainable parameters and {steps} steps; a profile needs at least one of each")
    with _unchanged(model):
        optimizer = torch.optim.AdamW(names.values(), lr=0.0)
        runs = [_timed_step(model, names, batch, loss, optimizer) for _ in range(WARMUP_STEPS + steps)][WARMUP_STEPS:]
        flops, saved_bytes = _count_work(model, batch, loss)
        errors = {spec: _errors(spec, names) for spec in specs}
        noise = measure_noise(model, names, batch, loss)
    ready_s = {name: median(run.ready_s.get(name, run.backward_s) for run in runs) for name in names}
    parameter_bytes = sum(p.nbytes for p in names.values())
    return ModelProfile.in_ready_order(
        {_spec(name, names[name]): at_s for name, at_s in ready_s.items()},
        forward_s=median(run.forward_s for run in runs),
        backward_s=median(run.backward_s for run in runs),
        optimizer_s=median(run.optimizer_s for run in runs),
        flops=flops,
        # Weights are read twice and their gradients written; what backward needs is written and read.
        memory_bytes=3.0 * parameter_bytes + 2.0 * saved_bytes,
        slowdown=slowdown,
        batch=samples(batch),
        noise=noise,
        errors=errors,
    )


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Call the model with the batch; its output, its ``.loss``, or the mean square of its output is the loss."""
    if isinstance(batch, dict):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    out = getattr(out, "loss", out)
    if not isinstance(out, Tensor):
        raise ConfigError(f"the model returned {type(out).__name__}, no tensor; return a loss function as third value")
    return out if out.numel() == 1 else out.float().square().mean()


def _timed_step(
    model: nn.Module, names: dict[str, nn.Parameter], batch: Any, loss: Loss, optimizer: torch.optim.Optimizer
) -> _Times:
    times = _Times()
    device = next(iter(names.values())).device
    optimizer.zero_grad(set_to_none=True)
    began_s = _clock_s(device)
    value = loss(model, batch)
    forward_end_s = _clock_s(device)

    def ready(name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            times.ready_s[name] = time.perf_counter() - forward_end_s

        return hook

    handles = [p.register_post_accumulate_grad_hook(ready(name)) for name, p in names.items()]
    try:
        value.backward()
    finally:
        for handle in handles:
            handle.remove()
    backward_end_s = _clock_s(device)
    optimizer.step()
    times.optimizer_s = _clock_s(device) - backward_end_s
    times.forward_s, times.backward_s = forward_end_s - began_s, backward_end_s - forward_end_s
    return times


def _count_work(model: nn.Module, batch: Any, loss: Loss) -> tuple[float, float]:
    """FLOPs of forward and backward, and the bytes that forward leaves for backward."""
    from torch.utils.flop_counter import FlopCounterMode  # it loads triton, which nobody who only trains needs

    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.data_ptr()] = tensor.nbytes
        return tensor

    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(model, batch).backward()
    return float(counter.get_total_flops()), float(sum(seen.values()))


def _errors(spec: str, names: dict[str, nn.Parameter]) -> dict[str, float]:
    """On the gradients that are there."""
    return {
        name: relative_error(spec, p.grad.cpu(), TensorSpec(name, tuple(p.shape)))
        for name, p in names.items()
        if p.grad is not None
    }


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Steps in between leave no trace: not in buffers (BatchNorm), not in gradients, not in the random state."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    training = model.training
    for parameter, _ in gradients:
        parameter.grad = None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            model.train(training)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _clock_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _spec(name: str, parameter: nn.Parameter) -> TensorSpec:
    return TensorSpec(name, tuple(parameter.shape), parameter.dtype, parameter.device)
