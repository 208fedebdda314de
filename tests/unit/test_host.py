"""Host offload: the same results as without it, begun at once, in a thread that ends."""

from __future__ import annotations

import threading

import pytest
import torch

from thinwire.comm.simulate import simulate
from thinwire.core import Compressor, Exchange, Exchanged, State, Step, TensorSpec, UnitSpec, make
from thinwire.wrappers import with_feedback
from thinwire.wrappers.host import OnHost, stop_worker

UNIT = UnitSpec((TensorSpec("a", (40, 30)), TensorSpec("b", (7, 11))))


@pytest.mark.parametrize("spec", ["topk(density=0.1)", "int4", "powersgd(rank=2)", "dense", "threshold(value=0.5)"])
def test_the_host_computes_what_the_device_would(spec: str) -> None:
    inner = with_feedback(make(spec))
    for compressor in (inner, OnHost(inner=inner)):
        states = [compressor.init(UNIT) for _ in range(3)]
        means = []
        for index in range(3):
            done = simulate([_exchange(compressor, states[rank], rank, index) for rank in range(3)])
            states = [one.state for one in done]
            means.append(done[0].mean)
        if compressor is inner:
            expected = means, states
    assert all(torch.equal(got, wanted) for got, wanted in zip(means, expected[0], strict=True))
    for got, wanted in zip(states, expected[1], strict=True):
        assert all(torch.equal(got[key], wanted[key]) for key in wanted)


def _exchange(compressor: Compressor, state: State, rank: int, index: int) -> Exchange:
    x = torch.randn(UNIT.numel, generator=torch.Generator().manual_seed(10 * index + rank))
    return compressor.exchange(x, state, Step(index, UNIT, rank, 3))


class _Recording(Compressor):
    """Says in which thread it ran, and when."""

    name = "recording"

    def __init__(self) -> None:
        self.began = threading.Event()
        self.thread = ""

    def exchange(self, x: torch.Tensor, state: State, step: Step) -> Exchange:
        self.thread = threading.current_thread().name
        self.began.set()
        return Exchanged(x, None, state)
        yield

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        return 0


def test_work_begins_when_the_exchange_is_made_and_the_thread_ends() -> None:
    inner = _Recording()
    exchange = OnHost(inner=inner).exchange(torch.zeros(3), {}, Step(0, UnitSpec.flat(3)))
    assert inner.began.wait(10.0), "nothing happened before the first request was asked for"
    with pytest.raises(StopIteration):
        next(exchange)
    assert inner.thread.startswith("thinwire-host")
    stop_worker()
    stop_worker()  # harmless
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("thinwire-host")]
