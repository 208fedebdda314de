"""Everything that a training run is: weights, optimizers, buffers, random numbers, the wire, and whatever else was named.

*Replicated* state is the same on all ranks and written once; *local* state is written by every rank. Buffers are local:
DDP may leave them different.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.checkpoint import rng
from thinwire.checkpoint.optim_state import check_optimizer, load_optimizer, optimizer_state
from thinwire.core import CheckpointError, ConfigError
from thinwire.engine.target import unwrap_optimizer

_EXTRA_STATE = "_extra_state"


class Stateful(Protocol):
    """What torch calls so: schedulers, scalers, samplers, attached wires."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class TrainingState:
    """One rank's.

    Args:
        extra: by name, objects with ``state_dict``/``load_state_dict``, ``torch.Generator``s or plain dictionaries.
        rng: the global random number generators too.

    Attributes:
        module: without DDP and torch.compile around it.
        parameters: by name; tied ones once.
        names: by ``id`` of a parameter of the optimizers.
    """

    def __init__(
        self, model: nn.Module, optimizers: object, wire: Stateful | None, extra: Mapping[str, Any], rng: bool
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}, expected an nn.Module")
        given = optimizers if isinstance(optimizers, Iterable) else () if optimizers is None else (optimizers,)
        self.module, self.wire, self.extra = bare(model), wire, dict(extra)
        self.optimizers = tuple(unwrap_optimizer(one) for one in given)
        self.parameters = dict(self.module.named_parameters())
        self.names = {id(p): name for name, p in self.parameters.items()}
        for number, optimizer in enumerate(self.optimizers):
            strangers = (p for group in optimizer.param_groups for p in group["params"] if id(p) not in self.names)
            self.names |= {id(p): f"optimizer.{number}.parameter.{i}" for i, p in enumerate(strangers)}
        self._rng = rng
        for name, one in self.extra.items():
            if not (_is_stateful(one) or isinstance(one, torch.Generator | MutableMapping)):
                raise ConfigError(
                    f"extra[{name!r}] is a {type(one).__name__}; expected an object with state_dict() and "
                    "load_state_dict(), a torch.Generator or a dictionary"
                )

    @property
    def fingerprint(self) -> str:
        """Differs when names, shapes or dtypes of the model or the kinds of optimizers differ."""
        model = [f"{name}{tuple(p.shape)}{p.dtype}" for name, p in self.parameters.items()]
        kinds = [type(one).__name__ for one in self.optimizers]
        return hashlib.blake2b(repr((model, kinds)).encode(), digest_size=8).hexdigest()

    def replicated(self) -> dict[str, Any]:
        """Weights and optimizers; the tensors themselves, no copies."""
        optimizers = [optimizer_state(one, self.names) for one in self.optimizers]
        return {"model": {name: p.detach() for name, p in self.parameters.items()}, "optimizers": optimizers}

    def local(self) -> dict[str, Any]:
        """What may differ from rank to rank."""
        state = self.small()
        return state if self.wire is None else {**state, "wire": self.wire.state_dict()}

    def small(self) -> dict[str, Any]:
        """Local state without the wire: cheap enough for every step."""
        state: dict[str, Any] = {
            "buffers": self._buffers(),
            "extra": {name: _get(one) for name, one in self.extra.items()},
        }
        return {**state, "rng": rng.rng_state()} if self._rng else state

    def check(self, replicated: Mapping[str, Any], local: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless all of it fits. Nothing is changed."""
        _check_tensors("parameter", replicated["model"], self.parameters)
        if len(replicated["optimizers"]) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint has {len(replicated['optimizers'])} optimizers, expected {len(self.optimizers)}; give the "
                "same ones as in the run that was saved"
            )
        for saved, optimizer in zip(replicated["optimizers"], self.optimizers, strict=True):
            check_optimizer(saved, optimizer, self.names)
        _check_tensors("buffer", local["buffers"], self._buffers())
        missing = sorted(self.extra.keys() - local["extra"].keys())
        if missing:
            raise CheckpointError(f"the checkpoint has no extra state {missing}; it has {sorted(local['extra'])}")

    @torch.no_grad()
    def apply(self, replicated: Mapping[str, Any], local: Mapping[str, Any]) -> None:
        """Continue from there; the wire is left to the caller."""
        for name, value in replicated["model"].items():
            self.parameters[name].copy_(value)
        for saved, optimizer in zip(replicated["optimizers"], self.optimizers, strict=True):
            load_optimizer(saved, optimizer, self.names)
        self.apply_small(local)

    @torch.no_grad()
    def apply_small(self, local: Mapping[str, Any]) -> None:
        """Buffers, extras and random numbers."""
        buffers = dict(self.module.named_buffers())
        for name, value in local["buffers"].items():
            if name in buffers:
                buffers[name].copy_(value)
            else:
                self.module.get_submodule(name.removesuffix(_EXTRA_STATE).rstrip(".")).set_extra_state(value)
        for name, one in self.extra.items():
            _set(one, local["extra"][name])
        if self._rng and "rng" in local:
            rng.set_rng_state(local["rng"])

    def _buffers(self) -> dict[str, Any]:
        """Whatever a state dict has besides parameters."""
        known = dict(self.module.named_parameters(remove_duplicate=False))
        return {name: value for name, value in self.module.state_dict().items() if name not in known}


def bare(model: nn.Module) -> nn.Module:
    """The module inside DDP and torch.compile, whose names a checkpoint has."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", model)
        if inner is model:
            return model
        model = inner


def _is_stateful(one: object) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _get(one: Any) -> Any:
    if _is_stateful(one):
        return one.state_dict()
    return one.get_state() if isinstance(one, torch.Generator) else dict(one)


def _set(one: Any, state: Any) -> None:
    if _is_stateful(one):
        one.load_state_dict(state)
    elif isinstance(one, torch.Generator):
        one.set_state(state)
    else:
        one.clear()
        one.update(state)


def _check_tensors(what: str, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    if saved.keys() != expected.keys():
        missing, unexpected = sorted(expected.keys() - saved.keys()), sorted(saved.keys() - expected.keys())
        raise CheckpointError(
            f"the checkpoint is of another model: {what}s missing {missing[:5]}, unexpected {unexpected[:5]}; build the "
            "model as in the run that was saved"
        )
    for name, own in expected.items():
        value = saved[name]
        if isinstance(own, Tensor) and (value.shape != own.shape or value.dtype is not own.dtype):
            raise CheckpointError(
                f"{what} {name} is {value.dtype} {tuple(value.shape)} in the checkpoint, expected {own.dtype} "
                f"{tuple(own.shape)}; build the model as in the run that was saved"
            )
