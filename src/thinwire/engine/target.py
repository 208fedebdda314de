"""What the user gave to ``attach``: which kind of module it is, its parameters by clean name, its optimizers unwrapped.

Frameworks wrap modules and optimizers in their own classes. All of that is undone here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.core import ConfigError, TensorSpec
from thinwire.engine.base import Engine


class Kind(NamedTuple):
    """A kind of module, and the engine for it.

    Args:
        engine: ``module:class``, imported when it is needed.
        prefix: that the wrapper puts before parameter names.
    """

    name: str
    accepts: Callable[[nn.Module], bool]
    engine: str
    prefix: str = ""


# The first one that accepts a module is used. A new engine is one line here.
KINDS = (
    Kind("ddp", lambda m: isinstance(m, DistributedDataParallel), "thinwire.engine.ddp:DDPEngine", "module."),
    Kind("plain", lambda m: True, "thinwire.engine.plain:PlainEngine"),
)


@dataclass(frozen=True)
class Target:
    """What gradients are exchanged of.

    Args:
        module: without what hides its kind.
        parameters: that require gradients, by the name that a checkpoint of the bare model has.
        optimizers: the real ones, that hooks can be put on.
    """

    kind: Kind
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    optimizers: tuple[torch.optim.Optimizer, ...]

    @property
    def tensors(self) -> list[TensorSpec]:
        """The parameters as specs."""
        return [TensorSpec(name, tuple(p.shape), p.dtype, p.device) for name, p in self.parameters.items()]

    @property
    def device(self) -> torch.device:
        """Where the gradients live."""
        return next(iter(self.parameters.values())).device

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The one that the module averages over; None: all ranks."""
        group: dist.ProcessGroup | None = getattr(self.module, "process_group", None)
        return group

    def engine(self, *arguments: Any, **settings: Any) -> Engine:
        """The engine for this kind, attached."""
        module, _, name = self.kind.engine.partition(":")
        engine: Engine = getattr(import_module(module), name)(self, *arguments, **settings)
        return engine


def resolve(module: nn.Module, optimizer: object = None) -> Target:
    """What was given, unwrapped.

    Args:
        optimizer: one, several, or None.

    Raises:
        ConfigError: it is something else, or nothing of it can be averaged.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"the first argument is a {type(module).__name__}; expected an nn.Module or a DDP module")
    module = _unwrap_module(module)
    kind = next(kind for kind in KINDS if kind.accepts(module))
    given = optimizer if isinstance(optimizer, Iterable) else () if optimizer is None else (optimizer,)
    return Target(kind, module, _trainable(module, kind.prefix), tuple(unwrap_optimizer(one) for one in given))


def unwrap_optimizer(given: object) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's, Lightning's and similar wrappers, which have no hooks of their own."""
    inner = given
    while True:
        candidates = (getattr(inner, name, None) for name in ("_optimizer", "optimizer"))
        wrapped = next((one for one in candidates if isinstance(one, torch.optim.Optimizer) and one is not inner), None)
        if wrapped is None:
            break
        inner = wrapped
    if not isinstance(inner, torch.optim.Optimizer) or not hasattr(inner, "_optimizer_step_pre_hooks"):
        raise ConfigError(
            f"optimizer is a {type(given).__name__}; expected a torch.optim.Optimizer, or several in a list"
        )
    return inner


def _unwrap_module(module: nn.Module) -> nn.Module:
    """DDP inside torch.compile is still DDP: treated as a plain module, its gradients would be averaged twice."""
    inner = getattr(module, "_orig_mod", module)
    special = any(kind.accepts(inner) for kind in KINDS[:-1])
    return inner if special else module


def _trainable(module: nn.Module, prefix: str) -> dict[str, nn.Parameter]:
    """Parameters by clean name: wrappers such as DDP and torch.compile add prefixes that a checkpoint must not have."""
    parameters = {_clean(name, prefix): p for name, p in module.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigError(f"{type(module).__name__} has no parameter that requires gradients; nothing to attach to")
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ConfigError(f"{name} is {parameter.dtype}; only real floating-point parameters can be averaged")
    return parameters


def _clean(name: str, prefix: str) -> str:
    return ".".join(part for part in name.removeprefix(prefix).split(".") if part != "_orig_mod")


def names_of_kinds() -> Sequence[str]:
    """The kinds of modules that can be attached to."""
    return [kind.name for kind in KINDS]
