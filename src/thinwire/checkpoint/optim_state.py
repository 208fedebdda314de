"""An optimizer's state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.core import CheckpointError


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Its parameter groups: learning rates and all other settings, implementation flags included, and names."""
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "names": _names(group, names)}
        for group in optimizer.param_groups
    ]


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Everything it keeps, by name. The tensors are its own.

    Args:
        names: by ``id`` of a parameter.
    """
    state = {names[id(p)]: dict(kept) for p, kept in optimizer.state.items() if isinstance(p, Tensor)}
    return {"groups": groups_of(optimizer, names), "state": state}


def check_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Raise CheckpointError unless the saved groups hold the parameters that this optimizer has."""
    got = [group.get("names") for group in saved["groups"]]
    expected = [_names(group, names) for group in optimizer.param_groups]
    if got != expected:
        where = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), "count")
        raise CheckpointError(
            f"the saved {type(optimizer).__name__} has other parameters in its groups (first difference: group {where}); "
            "build model and optimizer as in the run that was saved"
        )


def load_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Continue from ``saved``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    number = {names[id(p)]: index for index, p in enumerate(parameters)}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "names"},
            "params": [number[n] for n in group["names"]],
        }
        for group in saved["groups"]
    ]
    state = {number[name]: kept for name, kept in saved["state"].items()}
    present = {index: dict(optimizer.state.get(p, {})) for index, p in enumerate(parameters)}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    # torch casts state to the parameters' dtype; some optimizers keep fp32 beside bf16 weights. Copies: what was read goes.
    for index, kept in state.items():
        parameter = parameters[index]
        for key, value in kept.items():
            if isinstance(value, Tensor):
                optimizer.state[parameter][key] = _copied(value, present[index].get(key), parameter, key)


def _copied(value: Tensor, present: object, parameter: Tensor, key: str) -> Tensor:
    """A tensor of its own with the saved values: the one that is there already, if it fits."""
    if isinstance(present, Tensor) and (present.shape, present.dtype) == (value.shape, value.dtype):
        return present.copy_(value)
    return value.detach().to(value.device if key == "step" else parameter.device, copy=True)


def set_groups(saved: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """The settings of one step, for replay."""
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in settings.items() if key != "names"})


def _names(group: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    return [names[id(p)] for p in group["params"]]
