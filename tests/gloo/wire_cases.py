"""Cases: a real process group answers requests as the simulator does, bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contract.menagerie import BY_NAME, Specimen
from contract.world import run_unit
from gloo.support import Case, Rank, specs
from thinwire.comm import Framed, Tag, TorchDistTransport, Transport, pairs
from thinwire.core import AllGather, AllToAll, Compressor, Exchange, Exchanged, Step, make
from thinwire.wrappers import with_feedback

STEPS = 2
# Their sums are not exact, and from three ranks on gloo adds in another order than the simulator.
INEXACT = ("powersgd", "acp", "mipd", "hypernet")
CASES: dict[str, Case] = {}


def drive(exchange: Exchange, transport: Transport, step: int) -> Exchanged:
    """Answer one exchange through ``transport``, round by round."""
    reply: Any = None
    round_index = 0
    while True:
        try:
            asked = exchange.send(reply)
        except StopIteration as stop:
            result: Exchanged = stop.value
            return result
        requests = asked if isinstance(asked, tuple) else (asked,)
        tag = Tag(step, 0, round_index)
        replies = tuple(pending.wait() for pending in [transport.start(request, tag) for request in requests])
        reply = replies if isinstance(asked, tuple) else replies[0]
        round_index += 1


def _gradient(specimen: Specimen, rank: int, step: int) -> Tensor:
    """Small whole numbers: their sums are exact, so the order in which gloo adds does not show."""
    return (specimen.gradient(rank, step).clamp(-9, 9) * 4).round()


@cache
def _group(world_size: int) -> Any:
    """The first ranks as a group of their own; every rank must ask for it, also those outside."""
    return dist.new_group(list(range(world_size)))


def reproduces_simulator(compressor: Compressor, rank: Rank, world: int) -> None:
    """The same exchanges here and in the simulator of all ranks."""
    group = _group(world)
    if rank.index >= world:
        return
    specimen = BY_NAME["unlike"]
    gradients = [[_gradient(specimen, r, step) for r in range(world)] for step in range(STEPS)]
    expected = run_unit(compressor, specimen.unit, gradients)
    transport = Framed(TorchDistTransport(group), config=7)
    state = compressor.init(specimen.unit)
    for step in range(STEPS):
        x = gradients[step][rank.index].clone()
        exchange = compressor.exchange(x, state, Step(step, specimen.unit, rank.index, world))
        got = drive(exchange, transport, step)
        state = got.state
        _compare(compressor, got, expected[step].results[rank.index], world)


def _compare(compressor: Compressor, got: Exchanged, expected: Exchanged, world_size: int) -> None:
    pairs = [(got.mean, expected.mean), *((got.state[key], value) for key, value in expected.state.items())]
    for one, other in pairs:
        if world_size > 2 and any(name in str(compressor) for name in INEXACT):
            one, other = one.double(), other.double()
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
        else:
            assert torch.equal(one, other)


def long_messages(rank: Rank, world: int) -> None:
    """All-to-alls that go pair by pair, several under way at once, between short ones; and gathers of both lengths."""
    group = _group(world)
    if rank.index >= world:
        return
    transport = TorchDistTransport(group)
    lengths = [1, 32 << 10, pairs.FROM_BYTES - 1, pairs.FROM_BYTES, 2 * pairs.PIECE_BYTES + 1]

    def message(source: int, target: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * source + target)
        return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)

    rows = [torch.stack([message(rank.index, target, length) for target in range(world)]) for length in lengths]
    scattered = [transport.start(AllToAll(row), Tag()) for row in (*rows, *rows)]
    gathered = [transport.start(AllGather(row[0].contiguous()), Tag()) for row in rows]
    for pending, length in zip(scattered, (*lengths, *lengths), strict=True):
        for source, got in enumerate(pending.wait()):
            assert torch.equal(got, message(source, rank.index, length)), (length, source)
    for pending, length in zip(gathered, lengths, strict=True):
        for source, got in enumerate(pending.wait()):
            assert torch.equal(got, message(source, 0, length)), (length, source)


def _case(text: str, world_size: int) -> Case:
    return lambda rank: reproduces_simulator(with_feedback(make(text)), rank, world_size)


def _is_runnable(text: str, world_size: int) -> bool:
    """Groups of ranks need a transport over the whole job, which has four."""
    return "hierarchical" not in text or world_size == 4


def _long_messages(world_size: int) -> Case:
    return lambda rank: long_messages(rank, world_size)


for _world_size in (1, 2, 3, 4):
    CASES[f"{_world_size} ranks: long messages"] = _long_messages(_world_size)
    for _text in (text for text in specs() if _is_runnable(text, _world_size)):
        CASES[f"{_world_size} ranks: {_text}"] = _case(_text, _world_size)
