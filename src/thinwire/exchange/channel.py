"""A channel: tensors that the same ranks average again and again, with the state that compressors keep in between."""

from __future__ import annotations

import reprlib
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from thinwire.comm.link import Link
from thinwire.core import CheckpointError, Compressor, ConfigError, State, TensorSpec, memory
from thinwire.core.schema import to_json
from thinwire.exchange import states
from thinwire.exchange.flags import FlagLayout
from thinwire.exchange.membership import Membership
from thinwire.exchange.transaction import Transaction
from thinwire.fusion.groups import Group, GroupPlan, Unit, density_of, make_groups, read_plans


class SideInputs(Protocol):
    """What some compressors want to see besides the tensors."""

    def weights(self, unit: Unit) -> Tensor:
        """The parameters of a unit, flat."""

    def importance(self, unit: Unit) -> Tensor | None:
        """How much a unit of gradient matters to the optimizer, flat; None where nobody knows."""


@dataclass(frozen=True)
class _Committed:
    """What a commit replaces."""

    states: dict[Unit, State]
    carried: dict[str, Tensor]


class Channel:
    """Belongs to the training thread. States are values: a commit swaps a dict and never writes into a tensor.

    Args:
        name: distinct among the channels of a link; its hash is in every header.
        tensors: what is averaged, in a fixed order, the same on all ranks.
        groups: which of them travel together, in the order in which they leave.
        seed: of random choices such as random-k.
        scalars: names of numbers that every rank sends with each transaction.
        owns_inputs: what is added may be moved and overwritten.
        side: for compressors that need weights or importance.

    Attributes:
        index: transactions begun; seeds, schedules and tags use it.
        isolated, norms: see ``measure``.
        place_of: by tensor name, its unit and its number there.
    """

    states: dict[Unit, State]
    place_of: dict[str, tuple[Unit, int]]

    def __init__(
        self,
        name: str,
        tensors: Sequence[TensorSpec],
        members: Membership,
        compressor: Compressor,
        groups: Sequence[GroupPlan],
        *,
        seed: int = 0,
        scalars: Sequence[str] = (),
        owns_inputs: bool = False,
        side: SideInputs | None = None,
    ) -> None:
        self.name, self.number = name, zlib.crc32(name.encode()) or 1
        self.tensors = {tensor.fqn: tensor for tensor in tensors}
        self.members, self.seed, self.owns_inputs, self.side = members, seed, owns_inputs, side
        self.index = 0
        self.isolated = self.norms = False
        self.pool = memory.Pool()
        self.scalars = tuple(scalars)
        self._open: list[Transaction] = []
        self._undo: _Committed | None = None
        self.carried: dict[str, Tensor] = {}
        self._bind(compressor, groups, states.initial(tensors, compressor))

    def begin(self, names: Collection[str] | None = None, *, scale: float = 1.0) -> Transaction:
        """Start averaging all tensors, or those of some whole groups. Open transactions share no tensor."""
        chosen = {
            number: group
            for number, group in enumerate(self.groups)
            if names is None or any(tensor.fqn in names for tensor in group.tensors)
        }
        covered = {tensor.fqn for group in chosen.values() for tensor in group.tensors}
        if names is not None and covered != set(names):
            raise ConfigError(f"{sorted(covered ^ set(names))} do not make up whole fusion groups of {self.name!r}")
        if not covered:  # nothing would ever end it
            raise ConfigError(f"a transaction of {self.name!r} was begun with no tensor; name those of some groups")
        shared = [name for one in self._open for name in one.names if name in covered]
        if shared:
            raise ConfigError(f"{shared[0]} is part of an open transaction of {self.name!r}; wait for that first")
        link = self.members.link()
        if link is not self._link:
            self._join(link, self.groups)
        transaction = Transaction(self, link, chosen, self.index, scale)
        self._undo = None
        self.index += 1
        self._open.append(transaction)
        link.open += 1
        return transaction

    def use(self, compressor: Compressor | None = None, groups: Sequence[GroupPlan] | None = None) -> None:
        """Another compressor or other groups from the next transaction on; all ranks alike. Residuals are carried over."""
        self._require_idle("changed")
        pieces, carried = states.at_rest(self.states, self._aside), self.carried
        if compressor is not None:
            tensors = list(self.tensors.values())
            pieces, carried = states.convert(tensors, (pieces, carried, self.compressor), compressor)
        self._bind(compressor or self.compressor, self.plan if groups is None else groups, pieces)
        self.carried = carried

    def measure(self, *, isolated: bool | None = None, norms: bool | None = None) -> None:
        """For the next transactions: groups wait for ``close`` (so that compute is timed alone); squared norms."""
        self.isolated = self.isolated if isolated is None else isolated
        self.norms = self.norms if norms is None else norms

    def rollback(self) -> None:
        """Undo the last commit: what it sent counts as never sent. Possible until the next ``begin``."""
        if self._undo is None:
            raise ConfigError(f"{self.name!r} has no commit to undo; roll back before the next transaction begins")
        self.states, self.carried = self._undo.states, self._undo.carried
        self._undo = None

    def state_dict(self) -> dict[str, Any]:
        """By tensor name. An open transaction is not in it: the index is that of the oldest one open."""
        return {
            "compress": str(self.compressor),
            "index": min((one.index for one in self._open), default=self.index),
            "seed": self.seed,
            "groups": to_json(self.plan),
            "tensors": states.at_rest(self.states, self._aside),
            "roles": states.roles(self.tensors.values(), self.compressor),
            "carried": {name: value.clone() for name, value in self.carried.items()},
        }

    def check_state(self, state: Mapping[str, Any], compressor: Compressor) -> list[GroupPlan]:
        """The groups of a saved state; raises CheckpointError where any of it does not fit ``compressor``."""
        for key in ("index", "seed"):
            if type(state.get(key)) is not int:
                raise CheckpointError(
                    f"the checkpoint's {key} is {reprlib.repr(state.get(key))}, expected a whole number"
                )
        if not 0 <= state["index"] < 1 << 32:  # headers have 32 bits for it
            raise CheckpointError(f"the checkpoint's index is {state['index']}, expected one from 0 to 2^32 - 1")
        plans = read_plans(state.get("groups"), self.tensors)
        states.check(state.get("tensors"), state.get("carried"), self.tensors.values(), compressor)
        if density_of(compressor) is None and any(one.density is not None for one in plans):
            raise CheckpointError(f"the fusion plan in the checkpoint sets a density, which {compressor} does not have")
        return plans

    def load_state_dict(self, state: Mapping[str, Any], compressor: Compressor | None = None) -> None:
        """Go on exactly where ``state`` was taken. Nothing is changed if any of it is refused.

        Args:
            compressor: the one it was taken with, if that is not the present one.

        Raises:
            CheckpointError: other tensors, groups, keys, dtypes or sizes than this channel has, or values not finite.
        """
        self._require_idle("loaded")
        compressor = self.compressor if compressor is None else compressor
        plans = self.check_state(state, compressor)
        device = {name: tensor.device for name, tensor in self.tensors.items()}
        self._bind(
            compressor,
            plans,
            {
                name: {key: value.detach().to(device[name], copy=True) for key, value in piece.items()}
                for name, piece in state["tensors"].items()
            },
        )
        self.index, self.seed = state["index"], state["seed"]
        self.carried = {name: value.detach().to(device[name], copy=True) for name, value in state["carried"].items()}

    def add_carried(self, unit: Unit, x: Tensor) -> None:
        """Add to a unit's input what a former compressor has left."""
        if self.carried:
            for tensor, part in zip(unit.spec.tensors, x.split(unit.spec.sizes), strict=True):
                if tensor.fqn in self.carried:
                    part.add_(self.carried[tensor.fqn])

    def ended(self, transaction: Transaction) -> None:
        """A transaction is over, well or not; called by it."""
        self._open.remove(transaction)
        transaction.link.open -= 1  # not the members' link, which may be another by now
        transaction.link.pool.end_step()
        self.pool.end_step()

    def commit(self, new: Mapping[Unit, State], used: Collection[str]) -> None:
        """Take over new states, except of tensors that no rank has used; called by a transaction."""
        self._undo = _Committed(self.states, self.carried)
        kept = {unit: [t.fqn for t in unit.spec.tensors if t.fqn not in used] for unit in new}
        replaced = {unit: states.with_kept(unit, self.states[unit], state, kept[unit]) for unit, state in new.items()}
        self.states = {**self.states, **replaced}
        if self.carried:
            sent = {t.fqn for unit in new for t in unit.spec.tensors if t.fqn in used}
            self.carried = {name: value for name, value in self.carried.items() if name not in sent}

    def _bind(self, compressor: Compressor, plans: Sequence[GroupPlan], pieces: Mapping[str, State]) -> None:
        """Units and their states; in the training thread, so that link threads only ever read them."""
        named = [name for plan in plans for name in plan.names]
        if sorted(named) != sorted(self.tensors):  # the state of a tensor in no group would be lost
            raise ConfigError(f"the groups of {self.name!r} name {named}; expected each of its tensors once")
        groups = make_groups(plans, self.tensors, compressor)
        bound, aside = states.bind(groups, pieces)
        self._join(self.members.link(), groups)  # the link may refuse: up to here nothing has changed
        self.compressor, self.plan, self.groups = compressor, list(plans), groups
        self.states, self._aside = bound, aside
        self.place_of = {
            t.fqn: (unit, index)
            for group in groups
            for unit in group.units
            for index, t in enumerate(unit.spec.tensors)
        }
        self._undo = None

    def _join(self, link: Link, groups: Sequence[Group]) -> None:
        """Send over this link from now on: it knows what rounds to expect, and its ranks have places among the flags."""
        compressors = [unit.compressor for group in groups for unit in group.units]
        link.declare(self.number, [compressor.rounds for compressor in compressors])
        for compressor in compressors:  # in an order that all ranks share
            link.prepare(compressor.partitions(link.rank, link.world_size))
        self._link = link
        self.flags = FlagLayout(list(self.tensors), self.scalars, link.rank, link.world_size)

    def _require_idle(self, what: str) -> None:
        if self._open:
            raise ConfigError(f"{self.name!r} cannot be {what} while a transaction is open; wait for it first")
