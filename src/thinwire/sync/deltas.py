"""Deltas against an anchor: what this rank has moved since all ranks last agreed, averaged fragment by fragment.

The anchor A is bit-identical on all ranks: it starts from equal weights and moves by means only. A flight takes a snapshot S
of a fragment and sends ``weight·(S - A)``; the mean over the ranks, divided by the mean weight, is their weighted mean. What
the compressor does not send waits in the channel's residual. Weights and anchor are not touched here between ``begin`` and
``settle``, so compute goes on while a flight is under way.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from thinwire.core import CheckpointError, DesyncError
from thinwire.core.schema import NonFinite, from_json, to_json
from thinwire.exchange.states import check_names, check_tensor
from thinwire.exchange.transaction import Outcome, Transaction
from thinwire.fusion import parse_fusion
from thinwire.fusion.groups import plan_groups
from thinwire.fusion.prepare import prepare
from thinwire.sync.context import Context
from thinwire.sync.pieces import Piece, join, join_states, split, split_states

_FUSE = "8MiB"  # of fp32: large fragments travel in several groups, one encoded while another is on the wire
WEIGHT, SQUARE, CHECKSUM = "weight", "square", "checksum"
_NUMBERS = (WEIGHT, SQUARE, CHECKSUM)


@dataclass(frozen=True)
class Leave:
    """A fragment that is sent.

    Args:
        step: after which.
        interval: steps since it was sent the time before.
        scalars: what this rank tells the others.
    """

    fragment: int
    step: int
    interval: int
    scalars: Mapping[str, NonFinite]


@dataclass(frozen=True, eq=False)
class Flight:
    """A fragment on its way.

    Args:
        snapshot: the weights when it left, by piece.
    """

    leave: Leave
    snapshot: Mapping[str, Tensor]
    transaction: Transaction


@dataclass(frozen=True, eq=False)
class Landed:
    """A flight that has ended.

    Args:
        means: weighted means of the ranks' deltas, by piece; empty where some rank refused.
        mean_square: |mean|² over the fragment.
    """

    flight: Flight
    outcome: Outcome
    means: Mapping[str, Tensor]
    mean_square: float


class Deltas:
    """The anchor of a model and the flights that move it. Belongs to the training thread.

    Args:
        fragments: pieces that are averaged together.
        scalars: further numbers that every rank sends along.

    Attributes:
        anchor: by piece; only of the statistics before ``reset``.
    """

    def __init__(
        self,
        context: Context,
        fragments: Sequence[Sequence[Piece]],
        compress: str,
        scalars: Sequence[str] = (),
    ) -> None:
        self.fragments, self._tensors = fragments, context.tensors
        self.pieces = [piece for fragment in fragments for piece in fragment]
        self.compressor, world = prepare(compress), context.link.world_size
        planner = parse_fusion(_FUSE)
        planned = [plan_groups(planner, [p.spec for p in one], self.compressor, world) for one in fragments]
        groups = [group for plans in planned for group in plans]
        specs = [piece.spec for piece in self.pieces]
        self.channel = context.channel(specs, self.compressor, groups, (*_NUMBERS, *scalars))
        # Those of a forward pass differ already when weights are still equal, so theirs are taken at attach.
        self.anchor = self._copies([piece for piece in self.pieces if piece.owner in context.statistics])
        self.flights: deque[Flight] = deque()

    @property
    def is_anchored(self) -> bool:
        """Whether there is an anchor of the weights."""
        return len(self.anchor) == len(self.pieces)

    def weights(self, piece: Piece) -> Tensor:
        """This rank's weights, flat; a view."""
        return piece.of(self._tensors[piece.owner])

    def reset(self) -> None:
        """The weights of now become the anchor; they must be the same on all ranks, which the first flight checks."""
        self.anchor = {**self._copies(self.pieces), **self.anchor}

    def begin(self, fragment: int, step: int, interval: int, weight: float, scalars: Mapping[str, float]) -> None:
        """Take a snapshot and send it on its way."""
        numbers = {**scalars, WEIGHT: weight}
        if self.channel.index == 0:
            numbers[CHECKSUM] = self._checksum()
        self._launch(Leave(fragment, step, interval, numbers), self._copies(self.fragments[fragment]))

    def settle(self) -> Landed:
        """Wait for the oldest flight. Anchor and weights are the caller's to move.

        Raises:
            DesyncError: the ranks have started from different weights.
        """
        flight = self.flights.popleft()
        outcome = flight.transaction.wait()
        if len(set(outcome.scalars[CHECKSUM])) > 1:
            raise DesyncError(
                "anchor", rank=None, got="other weights", expected="the same at the first step on all ranks"
            )
        if not outcome.committed:
            return Landed(flight, outcome, {}, 0.0)
        # The same numbers in the same order on all ranks. Where nobody has moved, only residuals have travelled.
        mean_weight = fmean(outcome.scalars[WEIGHT]) or 1.0
        flat = {name: mean.reshape(-1) for name, mean in outcome.means.items()}
        means = flat if mean_weight == 1.0 else {name: mean / mean_weight for name, mean in flat.items()}
        return Landed(flight, outcome, means, _square(means))

    def state_dict(self) -> dict[str, Any]:
        """By tensor name. Flights are kept as they began: a load sends them again."""
        channel = self.channel.state_dict()
        flights = [
            {**to_json(one.leave), "snapshot": join(self.fragments[one.leave.fragment], one.snapshot)}
            for one in self.flights
        ]
        channel |= {"tensors": join_states(self.pieces, channel["tensors"])}
        del channel["roles"]  # by piece; a policy's state has one compressor, which knows them
        return {
            "anchor": join(self.pieces, self.anchor) if self.is_anchored else {},
            "flights": flights,
            "channel": channel,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError where anything does not fit; changes nothing."""
        check_names("deltas", state, dict.fromkeys(("anchor", "flights", "channel")))
        if state["anchor"]:
            self.check_joined("anchor", state["anchor"], self.pieces)
        for flight in state["flights"]:
            fragment = self._leave(flight).fragment
            if fragment not in range(len(self.fragments)):
                raise CheckpointError(f"the checkpoint has a flight of fragment {fragment}, which is none")
            self.check_joined("snapshot", flight.get("snapshot"), self.fragments[fragment])
        self.channel.check_state(self._channel_state(state), self.compressor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that was checked. Flights of before are waited for; those of the state begin again."""
        while self.flights:
            self.flights.popleft().transaction.wait()
        self.channel.load_state_dict(self._channel_state(state))
        if state["anchor"]:
            self.anchor = split(self.pieces, state["anchor"])
        for one in state["flights"]:
            leave = self._leave(one)
            self._launch(leave, split(self.fragments[leave.fragment], one["snapshot"]))

    def check_joined(self, what: str, joined: object, pieces: Sequence[Piece]) -> None:
        """Raise CheckpointError unless these are finite vectors for all owners of ``pieces``."""
        sizes: dict[str, int] = {}
        for piece in pieces:
            sizes[piece.owner] = sizes.get(piece.owner, 0) + piece.end - piece.start
        dtypes = {piece.owner: piece.spec.dtype for piece in pieces}
        check_names(what, joined, sizes)
        assert isinstance(joined, Mapping)
        for owner, value in joined.items():
            check_tensor(f"{what} of {owner}", value, sizes[owner], dtypes[owner])

    def _launch(self, leave: Leave, snapshot: Mapping[str, Tensor]) -> None:
        pieces = self.fragments[leave.fragment]
        # New tensors: the encode thread reads them while the optimizer writes the weights.
        moved = {piece.name: snapshot[piece.name] - self.anchor[piece.name] for piece in pieces}
        numbers = {**leave.scalars, SQUARE: _square(moved)}
        transaction = self.channel.begin(list(moved))
        for piece in pieces:
            delta = moved[piece.name] if numbers[WEIGHT] == 1.0 else moved[piece.name].mul_(numbers[WEIGHT])
            transaction.add(piece.name, delta.view(piece.spec.shape))
        transaction.close(scalars=numbers)
        self.flights.append(Flight(leave, snapshot, transaction))

    def _leave(self, flight: Any) -> Leave:
        plain = (
            {key: value for key, value in flight.items() if key != "snapshot"} if isinstance(flight, Mapping) else {}
        )
        remedy = "load an unchanged checkpoint"
        return from_json(Leave, plain, what="flight of sync", remedy=remedy, error=CheckpointError)

    def _copies(self, pieces: Sequence[Piece]) -> dict[str, Tensor]:
        return {piece.name: self.weights(piece).to(piece.spec.dtype, copy=True) for piece in pieces}

    def _channel_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        check_names("tensors", state["channel"].get("tensors"), dict.fromkeys(piece.owner for piece in self.pieces))
        tensors = split_states(self.pieces, state["channel"]["tensors"], self.compressor)
        return {**state["channel"], "tensors": tensors}

    def _checksum(self) -> float:
        """Of the anchor, in the 24 bits that fp32 holds exactly."""
        digest = 0
        for value in self.anchor.values():
            digest = zlib.crc32(value.cpu().numpy().data, digest)
        return float(digest & 0xFFFFFF)


def _square(values: Mapping[str, Tensor]) -> float:
    return float(sum((torch.dot(value, value) for value in values.values()), torch.zeros(())))
