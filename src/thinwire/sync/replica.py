"""One rank of a policy with local steps: counts steps, begins and merges flights, and keeps what lasts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.comm.link import ask
from thinwire.core import AllReduce, CheckpointError, ConfigError
from thinwire.core.schema import NonFinite, from_json, to_json
from thinwire.exchange.states import check_names
from thinwire.fusion.prepare import wire_bytes
from thinwire.sync.context import Context
from thinwire.sync.deltas import SQUARE, Deltas, Landed
from thinwire.sync.pieces import flat, join, split
from thinwire.sync.policy import Bound
from thinwire.sync.rate import ScaledRate

if TYPE_CHECKING:
    from thinwire.sync.local_steps import LocalSteps

log = logging.getLogger(__name__)
_REMEDY = "load the state that this rank saved with the same sync="
_TENSORS = ("memory", "deltas")  # of a saved state; all else is plain

Numbers = dict[str, float]


@dataclass(frozen=True)
class Round:
    """What all ranks know about an averaging that has committed.

    Args:
        step: local steps before it began.
        interval: steps since the same fragment was averaged the time before.
        scalars: by name, the value of each rank.
        mean_square: |mean delta|².
    """

    step: int
    fragment: int
    interval: int
    scalars: Mapping[str, list[float]]
    mean_square: float


@dataclass(frozen=True)
class _Counts:
    """The plain part of a saved state."""

    policy: str
    step: int
    taken: int
    marks: tuple[tuple[int, int], ...]
    losses: tuple[NonFinite, ...]
    numbers: Mapping[str, NonFinite]


class Replica(Bound):
    """Belongs to the training thread. Nothing here asks whether something has arrived: flights end at fixed steps."""

    def __init__(self, policy: LocalSteps, context: Context) -> None:
        super().__init__()
        self._policy, self._context = policy, context
        self._tensors = context.tensors
        self._fragments = policy.cut(self._tensors)
        self._deltas = Deltas(context, self._fragments, policy.compressor, policy.scalars)
        self._rate = ScaledRate(policy.rate_factor(context.link.world_size, context.optimizers))
        self._step = self._taken = 0
        self._marks = [(0, 0) for _ in self._fragments]  # steps and steps taken, when each was last sent
        self._losses: list[float] = []  # since the last averaging
        self._numbers = policy.begin()
        # Means alone move it: the same on all ranks.
        self._memory = {key: {p.name: _zeros(p.spec) for p in self._deltas.pieces} for key in policy.memory}
        self._began_s, self._exchange_s = time.perf_counter(), 0.0
        self._is_averaged = False
        context.engine.exchanging = not self.is_local

    @property
    def is_local(self) -> bool:
        return self._step >= self._policy.start

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the first local step all weights are equal: that is the anchor, also of a model that was loaded late."""
        if self.is_local:
            self._ensure_anchor()
            self._rate.apply(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._rate.restore(optimizer)

    def report_loss(self, loss: float) -> None:
        self._losses.append(loss)

    @torch.no_grad()
    def after_step(self, *, taken: bool) -> None:
        """First what is due is taken in, then what is next leaves: it has all the steps up to its own end to travel."""
        if self._is_averaged:
            raise ConfigError("an optimizer stepped inside wire.averaged(), whose weights are dropped at its end")
        was_local = self.is_local
        self._step, self._taken = self._step + 1, self._taken + taken
        if not was_local:
            self._mark_all()
            self._context.engine.exchanging = not self.is_local
            return
        self._ensure_anchor()
        delay = self._policy.delay
        self._merge_until(self._step - delay)
        for fragment in self._policy.due(self._step - self._policy.start, self._numbers):
            if self._fragments[fragment]:
                self._begin(fragment)
        if delay == 0:
            self._merge_until(self._step)

    @contextmanager
    def averaged(self, *, exact: bool) -> Iterator[None]:
        if not self.is_local or not self._deltas.is_anchored:
            yield  # all weights are equal still
            return
        own = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        self._is_averaged = True
        try:
            with torch.no_grad():
                self._put_mean() if exact or not self._policy.anchored else self._put_anchor()
            yield
        finally:
            self._is_averaged = False
            with torch.no_grad():
                for name, tensor in self._tensors.items():
                    tensor.detach().copy_(own[name])

    def explain(self) -> Sequence[str]:
        world, factor = self._context.link.world_size, self._rate.factor
        deltas = self._deltas
        sent = [wire_bytes([p.spec for p in one], deltas.compressor, world) for one in self._fragments]
        lines = [f"  {self._policy}: local steps, deltas by {deltas.compressor}"]
        lines += [f"  {len(sent)} fragment{'s' * (len(sent) > 1)} of up to {max(sent) / 1e6:.2f} MB per rank"]
        if self._policy.start:
            lines.append(f"  gradients are averaged in the first {self._policy.start} steps")
        if factor != 1.0:
            lines.append(f"  learning rate × {factor:g} in local steps (lr_scale=1.0 switches this off)")
        return lines

    def state_dict(self) -> dict[str, Any]:
        pieces, plain = self._deltas.pieces, (tuple(self._marks), tuple(self._losses), self._numbers)
        return {
            **to_json(_Counts(str(self._policy), self._step, self._taken, *plain)),
            "memory": {key: join(pieces, values) for key, values in self._memory.items()},
            "deltas": self._deltas.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any] | None) -> None:
        if state is None:
            raise CheckpointError(f"the checkpoint has no state of {self._policy}; {_REMEDY}")
        counts = self._counts(state)
        if counts.policy != str(self._policy) or len(counts.marks) != len(self._fragments):
            raise CheckpointError(f"the checkpoint's sync is {counts.policy}, expected {self._policy}; {_REMEDY}")
        check_names("tensors of sync", {key: state[key] for key in _TENSORS if key in state}, dict.fromkeys(_TENSORS))
        check_names("memory of sync", state["memory"], self._memory)
        for key, joined in state["memory"].items():
            self._deltas.check_joined(key, joined, self._deltas.pieces)
        self._deltas.check_state(state["deltas"])

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        assert state is not None, "check_state comes first"
        counts = self._counts(state)
        self._step, self._taken = counts.step, counts.taken
        self._marks, self._losses, self._numbers = list(counts.marks), list(counts.losses), dict(counts.numbers)
        self._memory = {key: split(self._deltas.pieces, joined) for key, joined in state["memory"].items()}
        self._deltas.load_state_dict(state["deltas"])
        self._context.engine.exchanging = not self.is_local

    def _counts(self, state: Mapping[str, Any]) -> _Counts:
        plain = {key: value for key, value in state.items() if key not in _TENSORS}
        return from_json(_Counts, plain, what="state of sync", remedy=_REMEDY, error=CheckpointError)

    def _ensure_anchor(self) -> None:
        if not self._deltas.is_anchored:
            self._deltas.reset()
            self._mark_all()

    def _mark_all(self) -> None:
        self._marks = [(self._step, self._taken) for _ in self._fragments]

    def _begin(self, fragment: int) -> None:
        self._context.check()
        step, taken = self._marks[fragment]
        self._marks[fragment] = (self._step, self._taken)
        share = (self._taken - taken) / max(self._step - step, 1)
        scalars = {name: self._measure(name, self._step - step) for name in self._policy.scalars}
        self._losses = []
        weight = share * self._policy.weight(self._numbers, scalars.get("loss", 0.0))
        self._deltas.begin(fragment, self._step, self._step - step, weight, scalars)

    def _measure(self, name: str, steps: int) -> float:
        if name == "loss":
            if not self._losses:
                raise ConfigError(f"{self._policy} adapts to the loss; call wire.report_loss(loss) in every step")
            return fmean(self._losses)
        if name == "lr":
            return float(self._context.optimizers[0].param_groups[0]["lr"])
        if name == "exchange_s":
            return self._exchange_s
        assert name == "step_s", name
        now_s = time.perf_counter()
        elapsed_s, self._began_s = now_s - self._began_s, now_s
        return elapsed_s / max(steps, 1)

    def _merge_until(self, step: int) -> None:
        while self._deltas.flights and self._deltas.flights[0].leave.step <= step:
            self._merge(self._deltas.settle())

    def _merge(self, landed: Landed) -> None:
        flight, outcome, policy = landed.flight, landed.outcome, self._policy
        leave = flight.leave
        report = outcome.report
        self.totals.add(report)
        self._exchange_s = report.encode_s + report.wire_s + report.decode_s
        self._tell(landed)
        if not outcome.committed:
            log.warning("step %d: nothing is averaged, because weights of some rank are NaN or Inf", leave.step)
            return
        local = leave.step - policy.start
        policy.adapt(self._numbers, Round(local, leave.fragment, leave.interval, outcome.scalars, landed.mean_square))
        for piece in self._fragments[leave.fragment]:
            anchor, mean = self._deltas.anchor[piece.name], landed.means[piece.name]
            if piece.owner in self._context.statistics:
                new = anchor + mean
            else:
                memory = {key: values[piece.name] for key, values in self._memory.items()}
                new = policy.outer(anchor, mean, memory, self._numbers)
                for key, value in memory.items():
                    self._memory[key][piece.name] = value
            policy.merge(self._deltas.weights(piece), new, flight.snapshot[piece.name], mean)
            self._deltas.anchor[piece.name] = new

    def _tell(self, landed: Landed) -> None:
        report, squares = landed.outcome.report, landed.outcome.scalars[SQUARE]
        fields = {
            "step": landed.flight.leave.step,
            "fragment": landed.flight.leave.fragment,
            "committed": report.committed,
            "wire_bytes": report.wire_bytes,
            "wait_s": report.wait_s,
            "mean_square": landed.mean_square,
            "drift_square": fmean(squares) - landed.mean_square,
            "numbers": dict(self._numbers),
        }
        self._context.observers.on_event("sync", fields)

    def _put_anchor(self) -> None:
        for piece in self._deltas.pieces:
            self._deltas.weights(piece).copy_(self._deltas.anchor[piece.name])

    def _put_mean(self) -> None:
        """In full precision, over the link: what is under way goes first, on all ranks alike."""
        for tensor in self._tensors.values():
            weights = flat(tensor)
            wide = weights.to(torch.promote_types(weights.dtype, torch.float32), copy=True)
            if wide.numel():
                weights.copy_(self._context.link.run(ask(AllReduce(wide))))


def _zeros(spec: Any) -> Tensor:
    return torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device)
