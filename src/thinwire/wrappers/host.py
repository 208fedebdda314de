"""Selection on the host: SSFusion (ICDE'26), after the authors' public code. Never run on an accelerator here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from thinwire.core import Compressor, Exchange, Exchanged, Request, State, Step, UnitSpec, Wrapper, make, register

_CPU = torch.device("cpu")
_Begun = tuple[Exchange, Request | tuple[Request, ...]] | Exchanged
_lock = threading.Lock()
_worker: ThreadPoolExecutor | None = None


@register("host")
@dataclass(frozen=True, kw_only=True)
class OnHost(Wrapper):
    """Run the wrapped compressor on the CPU, in a worker thread, while the accelerator computes and selects other units.

    Its state lives in host memory. Only the messages and the mean come back to the device. The work begins when the
    exchange is made, not when it is first asked, so that several units of a group proceed side by side.
    """

    def init(self, unit: UnitSpec) -> State:
        return self.inner.init(_on_host(unit))

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        ready = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None
        on_device = step.weights
        weights = None if on_device is None else lambda: on_device().cpu()
        importance = None if step.importance is None else step.importance.cpu()
        step = replace(step, unit=_on_host(step.unit), weights=weights, importance=importance)

        # The worker runs the code before the first request, so ``Step.on_not_finite`` may be called from its thread.
        def begin() -> _Begun:
            if ready is not None:
                ready.synchronize()  # on this thread only: nobody else waits for the copy
            exchange = self.inner.exchange(x.to(_CPU), {key: value.to(_CPU) for key, value in state.items()}, step)
            try:
                return exchange, next(exchange)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]  # it had nothing to ask

        return _finish(_submit(begin), x.device)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(inner=make("ef | topk(density=0.1)"))]


def _finish(begun: Future[_Begun], device: torch.device) -> Exchange:
    """Wait for the first request, then carry messages to the device and replies back until the exchange ends."""
    first = begun.result()
    if isinstance(first, Exchanged):
        return first._replace(mean=first.mean.to(device))
    exchange, asked = first
    while True:
        replies = yield _moved(asked, device)
        try:
            asked = exchange.send(tree_map_only(Tensor, lambda reply: reply.to(_CPU), replies))
        except StopIteration as stop:
            return stop.value._replace(mean=stop.value.mean.to(device))  # type: ignore[no-any-return]


def _moved(asked: Request | tuple[Request, ...], device: torch.device) -> Any:
    """The requests with their tensors on the device that the transport carries from."""
    if isinstance(asked, tuple):
        return tuple(_moved(one, device) for one in asked)
    tensors = {name: value.to(device) for name, value in vars(asked).items() if isinstance(value, Tensor)}
    return replace(asked, **tensors)  # type: ignore[arg-type]


def _on_host(unit: UnitSpec) -> UnitSpec:
    return UnitSpec(tuple(replace(tensor, device=_CPU) for tensor in unit.tensors))


def _submit(work: Any) -> Future[_Begun]:
    global _worker
    with _lock:
        if _worker is None:
            _worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="thinwire-host")
        return _worker.submit(work)


def stop_worker() -> None:
    """End the worker thread, if there is one; the next exchange starts another."""
    global _worker
    with _lock:
        worker, _worker = _worker, None
    if worker is not None:
        worker.shutdown()
