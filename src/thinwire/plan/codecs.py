"""What a compressor costs on this machine: seconds by elements for each stage of its exchange, and what it asks for.

A compressor is a coroutine, so several ranks of it can be driven in one process, in lock step, with a clock on the first.
That shows which collectives it uses in which round, how its bytes divide among them, and how long it computes in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm import Framed, Pending, Tag
from thinwire.comm.simulate import answer
from thinwire.comm.transport import Later
from thinwire.core import (
    Compressor,
    ConfigError,
    Exchanged,
    Request,
    State,
    Step,
    TensorSpec,
    UnitSpec,
    memory,
    residual_key,
)
from thinwire.fusion import Curve
from thinwire.fusion.prepare import prepare
from thinwire.plan.messages import Asked

WORLD_SIZES = (2, 8)  # decoding grows linearly with the ranks, so two are enough
SIDES = (64, 256, 768)  # of square matrices
REPEATS = 3

Rounds = tuple[tuple[Asked, ...], ...]


@dataclass(frozen=True)
class CodecCost:
    """One compressor as measured.

    Args:
        rounds: for each round what is asked for, with its share of all bytes sent.
        stages: by world size, seconds by elements: before the first round, between rounds, after the last.
        relative_error: ‖x - C(x)‖² / ‖x‖² of Gaussian numbers.
    """

    rounds: Rounds
    stages: Mapping[int, tuple[Curve, ...]]
    relative_error: float

    def __post_init__(self) -> None:
        stages = [len(curves) for curves in self.stages.values()]
        if stages != [len(self.rounds) + 1] * 2:
            raise ConfigError(
                f"stages has {stages} curves by world size; expected {len(self.rounds) + 1} for each of two"
            )

    def stage_s(self, elems: float, world_size: int) -> tuple[float, ...]:
        """Seconds of each stage. Decoding is linear in the world size; what comes before the first message is not.

        (Driving many ranks in one process makes their first stage slower, by cold caches that a real rank does not have.)
        """
        (low, first), (high, last) = sorted(self.stages.items())
        weight = max(0.0, (world_size - low) / (high - low))
        pairs = [(one(elems), other(elems)) for one, other in zip(first, last, strict=True)]
        later = (low_s + weight * max(0.0, high_s - low_s) for low_s, high_s in pairs[1:])
        return (pairs[0][0], *later)


def measure_codec(spec: str, sides: Sequence[int] = SIDES, repeats: int = REPEATS) -> CodecCost:
    """Drive the compressor on Gaussian matrices and time it; most take well under a second on an idle core."""
    compressor = prepare(spec)
    largest = max(sides)
    stages = {world: _stage_curves(compressor, world, sides, repeats) for world in WORLD_SIZES}
    few, many = (len(stages[world]) for world in WORLD_SIZES)
    if few != many:  # a tree has more rounds on more ranks; the larger world resembles real ones more
        stages = dict.fromkeys(WORLD_SIZES, stages[WORLD_SIZES[-1]])
    rounds = _shares(_settled(compressor, _unit(largest), WORLD_SIZES[-1]), WORLD_SIZES[-1])
    return CodecCost(rounds, stages, relative_error(spec, _gaussian(largest**2), _unit(largest).tensors[0]))


def relative_error(spec: str, gradient: Tensor, tensor: TensorSpec) -> float:
    """‖x - C(x)‖² / ‖x‖² of one gradient: how much of it does not arrive in the step it was computed in.

    Methods that learn from step to step (a warm-started basis) get a second step, with nothing waiting in the residual.
    """
    compressor, unit = prepare(spec).route(tensor), UnitSpec((tensor,))
    x, residual = gradient.detach().reshape(-1).float(), None
    states = [compressor.init(unit) for _ in range(2)]
    for index in range(2):
        states = [_without_residual(compressor, state) for state in states]
        run = _LockStep(compressor, unit, index, [x.clone() for _ in states], states)
        residual, states = run.results[0].residual, [result.state for result in run.results]
    key = residual_key(compressor.layout())
    kept = residual if key is None else states[0][key]
    return 0.0 if kept is None or not x.any() else float(kept.square().sum() / x.square().sum())


class _LockStep:
    """One exchange of several ranks from end to end, with the requests of the first rank and the seconds of its stages."""

    def __init__(
        self, compressor: Compressor, unit: UnitSpec, index: int, xs: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        self.stages_s: list[float] = []
        self.requests: list[tuple[Request, ...]] = []
        self.results: list[Exchanged] = []
        self._framed = Framed(_Nowhere(len(xs)))
        self._exchanges = [
            compressor.exchange(x, state, Step(index, unit, rank, len(xs), weights=partial(torch.ones_like, x)))
            for rank, (x, state) in enumerate(zip(xs, states, strict=True))
        ]
        self._drive(xs[0])

    def _drive(self, x: Tensor) -> None:
        replies: list[Any] = [None] * len(self._exchanges)
        while not self.results:
            clock = _clock()
            began_s = clock()
            if self.requests:
                _check(replies[0])
            else:  # what training does with every gradient beforehand
                kernels.all_finite(memory.empty(x.shape).copy_(x))
            asked = [self._advance(0, replies[0])]
            self.stages_s.append(clock() - began_s)
            asked += [self._advance(rank, replies[rank]) for rank in range(1, len(replies))]
            if not self.results:
                replies = self._answer(asked)

    def _advance(self, rank: int, reply: Any) -> tuple[Request, ...] | Request | None:
        try:
            asked = self._exchanges[rank].send(reply)
        except StopIteration as stop:
            self.results.append(stop.value)
            return None
        if rank == 0:
            self.requests.append(asked if isinstance(asked, tuple) else (asked,))
            for request in self.requests[-1]:
                self._framed.start(request, Tag())
        return asked

    def _answer(self, asked: Sequence[Any]) -> list[Any]:
        if not isinstance(asked[0], tuple):
            return list(answer(asked))
        answered = [answer(requests) for requests in zip(*asked, strict=True)]
        return [tuple(reply[rank] for reply in answered) for rank in range(len(asked))]


class _Nowhere:
    """A transport to nobody: ``Framed`` does its work in front of it, and that is timed."""

    rank, lanes = 0, 1

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def start(self, request: Request, tag: Tag) -> Pending:
        return Later(list)


def _check(reply: Any) -> None:
    """The checksums of gathered messages, which ``Framed`` would verify."""
    for one in reply if isinstance(reply, tuple) else (reply,):
        rows = one if isinstance(one, list) else one if one.dtype == torch.uint8 and one.dim() == 2 else ()
        for row in rows:
            if row.dtype == torch.uint8:
                kernels.crc32(row)


def _clock() -> Callable[[], float]:
    """Processor time where it is the time of the work: others on a busy machine then count only through the caches."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _stage_curves(compressor: Compressor, world_size: int, sides: Sequence[int], repeats: int) -> tuple[Curve, ...]:
    runs = [_settled(compressor, _unit(side), world_size, repeats) for side in sides]
    fewest = min(len(run.stages) for run in runs)
    return tuple(
        Curve.fit((float(side * side), run.stages[stage]) for side, run in zip(sides, runs, strict=True))
        for stage in range(fewest)
    )


@dataclass(frozen=True)
class _Settled:
    """A few steps in a row: the median seconds of each stage, and the requests of the last step."""

    stages: tuple[float, ...]
    requests: Sequence[tuple[Request, ...]]


def _settled(compressor: Compressor, unit: UnitSpec, world_size: int, repeats: int = 1) -> _Settled:
    """The first step is left out: it may allocate, and agree on things that later ones know."""
    xs = [_gaussian(unit.numel, rank) for rank in range(world_size)]
    states = [compressor.init(unit) for _ in xs]
    runs: list[_LockStep] = []
    with memory.recycling(memory.Pool()):
        for index in range(repeats + 1):
            runs.append(_LockStep(compressor, unit, index, [x.clone() for x in xs], states))
            states = [result.state for result in runs[-1].results]
    fewest = min(len(run.stages_s) for run in runs[1:])  # some methods need a further round in some steps
    stages = tuple(median(run.stages_s[stage] for run in runs[1:]) for stage in range(fewest))
    return _Settled(stages, min((run.requests for run in runs[1:]), key=len))


def _shares(settled: _Settled, world_size: int) -> Rounds:
    total = max(1, sum(r.sent_bytes(world_size) for requests in settled.requests for r in requests))
    return tuple(
        tuple(asked for request in requests for asked in Asked.of(request, world_size, total))
        for requests in settled.requests
    )


def _unit(side: int) -> UnitSpec:
    return UnitSpec((TensorSpec("probe.weight", (side, side)),))


def _gaussian(numel: int, rank: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * numel + rank))


def _without_residual(compressor: Compressor, state: State) -> State:
    residual = residual_key(compressor.layout())
    return {key: torch.zeros_like(value) if key == residual else value for key, value in state.items()}
