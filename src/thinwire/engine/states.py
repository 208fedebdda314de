"""Compressor state: joined per unit while training, cut per parameter name at rest.

DDP regroups its buckets after the first step and fusion plans change, so a unit is never the key of anything saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from thinwire.core import CheckpointError, Compressor, State, TensorSpec, UnitSpec
from thinwire.engine.groups import Unit


class StateStore:
    """The committed state of all units.

    Attributes:
        carried: by parameter name, what a former compressor still owed when this one took over; it is added to the next
            gradient that counts, so nothing is lost where this compressor keeps no residual.
    """

    def __init__(self, tensors: Iterable[TensorSpec], compressor: Compressor) -> None:
        self._compressors = {tensor.fqn: compressor.route(tensor) for tensor in tensors}
        self._specs = {tensor.fqn: tensor for tensor in tensors}
        self._at_rest = {fqn: self._compressors[fqn].init(UnitSpec((t,))) for fqn, t in self._specs.items()}
        self._in_use: dict[Unit, State] = {}
        self._unit_of: dict[str, Unit] = {}
        self.carried: dict[str, Tensor] = {}
        self._aside: dict[str, State] = {}  # what a unit's own compressor has no use for, where a plan gave it another

    def of(self, unit: Unit) -> State:
        """The state of a unit; on first sight it is joined from what its tensors had before, wherever that was."""
        if unit not in self._in_use:
            names = [tensor.fqn for tensor in unit.spec.tensors]
            for former in {self._unit_of[name] for name in names if name in self._unit_of}:
                self._put_to_rest(former)
            pieces = {name: self._at_rest.pop(name) for name in names}
            used = unit.compressor.layout().keys()
            for name, piece in pieces.items():
                self._aside[name] = {key: value for key, value in piece.items() if key not in used}
            self._in_use[unit] = join(list(pieces.values()), unit.compressor)
            self._unit_of.update(dict.fromkeys(names, unit))
        return self._in_use[unit]

    def converted(self, compressor: Compressor) -> StateStore:
        """The state with which another compressor takes over: residuals go along, everything else begins anew."""
        new = StateStore(self._specs.values(), compressor)
        for name, state in self.by_name().items():
            owed = [one for one in (state.get("residual"), self.carried.get(name)) if one is not None]
            if not owed:
                continue
            if "residual" in new._at_rest[name]:
                new._at_rest[name]["residual"] = sum(owed[1:], owed[0])
            else:
                new.carried[name] = sum(owed[1:], owed[0])
        return new

    def add_carried(self, unit: Unit, x: Tensor) -> None:
        """Add to a unit's gradient what a former compressor owes."""
        if self.carried:
            for tensor, part in zip(unit.spec.tensors, x.split(unit.spec.sizes), strict=True):
                if tensor.fqn in self.carried:
                    part.add_(self.carried[tensor.fqn])

    def commit(self, states: Mapping[Unit, State], untouched: Collection[str] = ()) -> None:
        """Take over the states that a step has left, except for tensors that keep what they had."""
        for unit, state in states.items():
            kept = [tensor.fqn for tensor in unit.spec.tensors if tensor.fqn in untouched]
            self._in_use[unit] = self._with_kept(unit, state, kept) if kept else state
            for tensor in unit.spec.tensors if self.carried else ():
                if tensor.fqn not in untouched:
                    self.carried.pop(tensor.fqn, None)

    def _with_kept(self, unit: Unit, state: State, kept: Collection[str]) -> State:
        old, new = cut(self._in_use[unit], unit), cut(state, unit)
        names = [tensor.fqn for tensor in unit.spec.tensors]
        return join([(old if name in kept else new)[name] for name in names], unit.compressor)

    def by_name(self) -> dict[str, State]:
        """A copy of everything, by parameter name."""
        pieces = {fqn: dict(state) for fqn, state in self._at_rest.items()}
        for unit, state in self._in_use.items():
            pieces.update(self._whole(state, unit))
        return {fqn: {key: value.clone() for key, value in pieces[fqn].items()} for fqn in self._specs}

    def load(self, pieces: Mapping[str, State], carried: Mapping[str, Tensor] | None = None) -> None:
        """Replace everything. Nothing is changed if anything does not fit.

        Raises:
            CheckpointError: other parameters, keys or sizes than this model and compressor have.
        """
        _check_names("parameters", set(pieces), set(self._specs))
        for fqn, tensor in self._specs.items():
            layout = self._compressors[fqn].layout()
            _check_names(f"state of {fqn}", set(pieces[fqn]), set(layout))
            for key, value in pieces[fqn].items():
                if value.shape != (layout[key].numel(tensor),):
                    raise CheckpointError(
                        f"{key} of {fqn} has {value.numel()} elements, expected {layout[key].numel(tensor)} in one row; "
                        "load a checkpoint of the same model and compressor"
                    )
        carried = carried or {}
        for name, value in carried.items():
            if name not in self._specs or value.shape != (self._specs[name].numel,):
                raise CheckpointError(
                    f"the checkpoint carries {value.numel()} elements for {name!r}, which do not fit; load a checkpoint "
                    "of the same model"
                )
        self.carried = {name: value.clone().to(self._specs[name].device) for name, value in carried.items()}
        self._in_use.clear()
        self._unit_of.clear()
        self._aside.clear()
        self._at_rest = {
            fqn: {key: value.clone().to(tensor.device) for key, value in pieces[fqn].items()}
            for fqn, tensor in self._specs.items()
        }

    def _put_to_rest(self, unit: Unit) -> None:
        self._at_rest.update(self._whole(self._in_use.pop(unit), unit))
        for tensor in unit.spec.tensors:
            del self._unit_of[tensor.fqn]
            del self._aside[tensor.fqn]

    def _whole(self, state: State, unit: Unit) -> dict[str, State]:
        """The states of a unit's tensors, with what was set aside."""
        return {name: {**self._aside[name], **piece} for name, piece in cut(state, unit).items()}


def cut(state: State, unit: Unit) -> dict[str, State]:
    """The state of a unit as one state per tensor."""
    pieces: dict[str, State] = {tensor.fqn: {} for tensor in unit.spec.tensors}
    for key, layout in unit.compressor.layout().items():
        parts = state[key].split([layout.numel(tensor) for tensor in unit.spec.tensors])
        for tensor, part in zip(unit.spec.tensors, parts, strict=True):
            pieces[tensor.fqn][key] = part
    return pieces


def join(pieces: list[State], compressor: Compressor) -> State:
    """The state of a unit from those of its tensors."""
    return {key: torch.cat([piece[key] for piece in pieces]) for key in compressor.layout()}


def _check_names(what: str, got: set[str], expected: set[str]) -> None:
    if got != expected:
        raise CheckpointError(
            f"the {what} in the checkpoint do not fit: missing {sorted(expected - got)}, "
            f"unexpected {sorted(got - expected)}; load a checkpoint of the same model and compressor"
        )
