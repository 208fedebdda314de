"""Compressor state as values: joined per unit while training, cut per tensor name at rest. Pure functions.

DDP regroups its buckets after the first step and fusion plans change, so a unit is never the key of anything saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core import CheckpointError, Compressor, Role, State, TensorSpec, UnitSpec, residual_key
from thinwire.fusion.groups import Group, Unit

ByName = dict[str, State]
ByUnit = dict[Unit, State]


def initial(tensors: Iterable[TensorSpec], compressor: Compressor) -> ByName:
    """The state before the first step."""
    return {tensor.fqn: compressor.route(tensor).init(UnitSpec((tensor,))) for tensor in tensors}


def bind(groups: Sequence[Group], pieces: Mapping[str, State]) -> tuple[ByUnit, ByName]:
    """The states of the groups' units, and by name what a unit's compressor has no use for.

    A fusion plan may give a tensor another compressor than routing did; what that one keeps waits aside.
    """
    states: ByUnit = {}
    aside: ByName = {}
    for unit in (unit for group in groups for unit in group.units):
        used = unit.compressor.layout().keys()
        names = [tensor.fqn for tensor in unit.spec.tensors]
        states[unit] = {key: torch.cat([pieces[name][key] for name in names]) for key in used}
        for name in names:
            aside[name] = {key: value.clone() for key, value in pieces[name].items() if key not in used}
    return states, aside


def cut(state: State, unit: Unit) -> ByName:
    """The state of a unit as one state per tensor; views."""
    pieces: ByName = {tensor.fqn: {} for tensor in unit.spec.tensors}
    for key, layout in unit.compressor.layout().items():
        parts = state[key].split([layout.numel(tensor) for tensor in unit.spec.tensors])
        for tensor, part in zip(unit.spec.tensors, parts, strict=True):
            pieces[tensor.fqn][key] = part
    return pieces


def at_rest(states: Mapping[Unit, State], aside: Mapping[str, State]) -> ByName:
    """A copy of everything, by tensor name."""
    pieces = {name: piece for unit, state in states.items() for name, piece in cut(state, unit).items()}
    return {
        name: {key: value.clone() for key, value in {**aside[name], **piece}.items()} for name, piece in pieces.items()
    }


def with_kept(unit: Unit, old: State, new: State, kept: Collection[str]) -> State:
    """The new state of a unit, except for the tensors named, which keep what they had."""
    if not kept:
        return new
    before, after = cut(old, unit), cut(new, unit)
    names = [tensor.fqn for tensor in unit.spec.tensors]
    return {
        key: torch.cat([(before if name in kept else after)[name][key] for name in names])
        for key in unit.compressor.layout()
    }


def roles(tensors: Iterable[TensorSpec], compressor: Compressor) -> dict[str, dict[str, str]]:
    """By tensor name and key, what each state tensor is."""
    layouts = {tensor.fqn: compressor.route(tensor).layout() for tensor in tensors}
    return {name: {key: one.role.value for key, one in layout.items()} for name, layout in layouts.items()}


def residual_of(state: State, compressor: Compressor) -> Tensor | None:
    """What a compressor keeps for later steps of one tensor; None where it keeps nothing."""
    found = [state[key] for key, layout in compressor.layout().items() if layout.role is Role.RESIDUAL]
    return sum(found[1:], found[0]) if found else None  # few-bit formats keep one for the mean, too


def convert(
    tensors: Iterable[TensorSpec],
    old: tuple[Mapping[str, State], Mapping[str, Tensor], Compressor],
    compressor: Compressor,
) -> tuple[ByName, dict[str, Tensor]]:
    """The state with which another compressor takes over, and what is carried.

    Residuals go along and everything else starts from zero. Where the new compressor keeps no residual, the old one is
    *carried*: added to the next input that commits, so that nothing is lost.

    Args:
        old: pieces by name, what they carried, and their compressor.
    """
    pieces, carried, former = old
    new, still_carried = initial(tensors, compressor), {}
    for tensor in tensors:
        residuals = [residual_of(pieces[tensor.fqn], former.route(tensor)), carried.get(tensor.fqn)]
        found = [one for one in residuals if one is not None]
        if not found:
            continue
        total = sum(found[1:], found[0])
        key = residual_key(compressor.route(tensor).layout())
        if key is None:
            still_carried[tensor.fqn] = total
        else:
            new[tensor.fqn][key] = total
    return new, still_carried


def check(pieces: Any, carried: Any, tensors: Iterable[TensorSpec], compressor: Compressor) -> None:
    """Raise CheckpointError unless these states, from a checkpoint, belong to these tensors and this compressor."""
    specs = {tensor.fqn: tensor for tensor in tensors}
    check_names("tensors", pieces, specs)
    if not isinstance(carried, Mapping):
        raise CheckpointError(
            f"carried: got a {type(carried).__name__}, expected a dictionary; load an unchanged checkpoint"
        )
    for name, tensor in specs.items():
        layout = compressor.route(tensor).layout()
        fresh = compressor.route(tensor).init(UnitSpec((tensor,)))
        check_names(f"state of {name}", pieces[name], layout)
        for key, value in pieces[name].items():
            check_tensor(f"{key} of {name}", value, layout[key].numel(tensor), fresh[key].dtype)
    for name, value in carried.items():
        if name not in specs:
            raise CheckpointError(
                f"carried: got a residual for {name!r}, which this model does not have; load a checkpoint of the same model"
            )
        check_tensor(f"what is carried for {name}", value, specs[name].numel, torch.float32)


def check_tensor(what: str, value: object, numel: int, dtype: torch.dtype) -> None:
    """Raise CheckpointError unless a saved value is a flat tensor of this size and dtype, with finite numbers."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        raise CheckpointError(f"{what} is a {type(value).__name__}, expected a tensor; load an unchanged checkpoint")
    if value.shape != (numel,):
        raise CheckpointError(
            f"{what} has {value.numel()} elements, expected {numel} in one row; load a checkpoint of the same model and "
            "compressor"
        )
    if value.dtype is not dtype:
        raise CheckpointError(f"{what} is {value.dtype}, expected {dtype}; load an unchanged checkpoint")
    if value.is_floating_point() and not bool(value.isfinite().all()):
        raise CheckpointError(f"{what} is not finite; it would turn weights into NaN: load an older checkpoint")


def check_names(what: str, got: object, expected: Mapping[str, object]) -> None:
    """Raise CheckpointError unless a saved dictionary has these keys."""
    if not isinstance(got, Mapping):
        raise CheckpointError(
            f"{what}: got a {type(got).__name__}, expected a dictionary; load an unchanged checkpoint"
        )
    if got.keys() != expected.keys():
        missing, unexpected = (
            sorted(map(str, one)) for one in (expected.keys() - got.keys(), got.keys() - expected.keys())
        )
        raise CheckpointError(
            f"{what}: missing {missing}, unexpected {unexpected}; load a checkpoint of the same model and compressor"
        )
