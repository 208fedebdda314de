"""Cases: after warm-up a step makes no buffers, copies nothing it need not copy, and memory does not grow. Two ranks."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import thinwire
from gloo.support import Cases, EngineCase, Rank, close, loss_of, mean_gradients, seeded, wrap
from thinwire.comm import Link
from thinwire.core import AllGather, Request
from thinwire.core.memory import IDLE_STEPS, SMALL_BYTES

CASES = Cases()
WIDTH = 192  # weights of 147 kB: far above what counts as small
WARMUP_STEPS, STEPS = 8, 20
RARE = 2  # buffers: messages may overlap as they never have before, but not in every step


class Wide(nn.Module):
    """Weights and biases of unequal sizes, so that padding and grouping take part."""

    def __init__(self) -> None:
        super().__init__()
        widths = (24, WIDTH, WIDTH + 8, WIDTH, 3)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class NewBuffers(TorchDispatchMode):
    """Notes every operation of its thread whose result lies in memory that is none of its arguments'."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                nbytes = leaf.untyped_storage().nbytes()
                if nbytes >= SMALL_BYTES:
                    self.found.append(f"{func}: {nbytes} bytes")
        return result


@contextmanager
def _watched(link: Link) -> Iterator[list[str]]:
    """Watches the communication threads: modes belong to a thread, so each must enter and leave by itself."""
    modes = [NewBuffers() for _ in range(1 + link.transport.lanes)]
    found: list[str] = []

    def visit(function: str, *args: Any) -> None:
        def in_every_thread() -> Generator[tuple[Request, ...], Any, Any]:
            """In lanes, what comes after round r runs in the thread of lane r; without them one thread does it all."""
            for mode in modes if link.rounds_in_lanes else modes[:1]:
                getattr(mode, function)(*args)
                if mode is not modes[-1] and link.rounds_in_lanes:
                    yield (AllGather(torch.zeros(1, dtype=torch.uint8)),)

        link.run(in_every_thread())

    visit("__enter__")
    yield found
    visit("__exit__", None, None, None)
    found += [one for mode in modes for one in mode.found]


def _allocation_case(compress: str) -> EngineCase:
    def makes_no_buffers(rank: Rank, engine: str) -> None:
        model = wrap(engine, seeded(Wide))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with thinwire.attach(model, optimizer, compress=compress) as wire:
            for step in range(WARMUP_STEPS):
                _step(model, optimizer, rank, step)
            with _watched(wire._link) as found:
                for step in range(WARMUP_STEPS, WARMUP_STEPS + STEPS):
                    _step(model, optimizer, rank, step)
            assert len(found) <= RARE, f"{len(found)} in {STEPS} steps, for example {found[:4]}"

    return makes_no_buffers


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank, step: int, *, drop: bool = True) -> None:
    optimizer.zero_grad(set_to_none=drop)
    loss_of(model, rank.index, step).backward()
    optimizer.step()


for _compress in ("dense", "bf16", "int4", "int8", "topk(density=0.05)"):
    for _engine in ("plain", "ddp"):
        CASES.add(_allocation_case(_compress), _engine, f"makes_no_buffers: {_compress}")


@CASES.both
def the_watch_notices_buffers(rank: Rank, engine: str) -> None:
    """The test above can fail: a method that is not worth the care makes buffers, and is seen."""
    model = wrap(engine, seeded(Wide))
    with thinwire.attach(model, compress="sign") as wire, _watched(wire._link) as found:
        loss_of(model, rank.index, 0).backward()
    assert found


@CASES.plain
def gradients_are_reduced_where_they_are(rank: Rank, engine: str) -> None:
    """Zeroed instead of dropped, gradients are views of the buffer that travels: no copy in and none out.

    But in the last group, if it is small: the agreement of the ranks needs room behind it.
    """
    model = wrap(engine, seeded(Wide))
    expected = mean_gradients(seeded(Wide), rank.world_size, 1)
    with thinwire.attach(model, compress="dense", fuse="none"):
        loss_of(model, rank.index, 0).backward()
        before = {name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=False)
        loss_of(model, rank.index, 1).backward()
        moved = []
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            moved += [name] if parameter.grad.data_ptr() != before[name] else []
            close(parameter.grad, expected[name])
        assert len(moved) <= 1, moved


@CASES.plain
def a_thousand_steps_do_not_grow(rank: Rank, engine: str) -> None:
    model = wrap(engine, seeded(Wide))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with thinwire.attach(model, optimizer, compress="int4") as wire:
        for step in range(2 * IDLE_STEPS + 1):
            _step(model, optimizer, rank, step)
        pool = wire._link.pool
        before = pool.made, pool.held_bytes
        resident = _resident_bytes()
        for step in range(1000):
            _step(model, optimizer, rank, step)
        # A block that only a rare overlap of messages needs is given back, and made again when it is needed next.
        assert pool.made - before[0] <= 1000 // IDLE_STEPS, f"{pool.made - before[0]} blocks"
        assert pool.held_bytes <= 1.1 * before[1]
        # A single lost buffer a step would be 150 MB; the C allocator's own tides are a few hundred kB.
        grown = _resident_bytes() - resident
        assert grown < 8 * 2**20, f"{grown} bytes"


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
