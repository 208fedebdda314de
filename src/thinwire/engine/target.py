"""What the user gave to ``attach``: which kind of module it is, its parameters by clean name, its optimizers unwrapped.

Frameworks wrap modules and optimizers in their own classes. All of that is undone here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from thinwire.core import ConfigError, TensorSpec
from thinwire.engine.base import Engine
from thinwire.engine.views import as_real


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
        sparse: names of parameters whose gradients are sparse tensors (``nn.Embedding(sparse=True)``).
        frozen: names of parameters that require no gradients.
    """

    kind: Kind
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    optimizers: tuple[torch.optim.Optimizer, ...]
    sparse: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()

    @property
    def tensors(self) -> list[TensorSpec]:
        """The parameters as specs; complex ones as pairs of reals."""
        views = {name: as_real(p.detach()) for name, p in self.parameters.items()}
        return [TensorSpec(name, tuple(view.shape), view.dtype, view.device) for name, view in views.items()]

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Means and variances that BatchNorm and its kin keep, by clean name."""
        layers = [(name, one) for name, one in self.module.named_modules() if isinstance(one, _NormBase)]
        named = [
            (f"{name}.{key}".lstrip("."), b) for name, one in layers for key, b in one.named_buffers(recurse=False)
        ]
        return {_clean(name, self.kind.prefix): b for name, b in named if b.is_floating_point()}

    @property
    def device(self) -> torch.device:
        """Where the gradients live."""
        return next(iter(self.parameters.values())).device

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The one that the module averages over; None: all ranks."""
        group: dist.ProcessGroup | None = getattr(self.module, "process_group", None)
        return group

    def check_unchanged(self) -> None:
        """Raise ConfigError if the module's parameters are not those of ``attach``: nobody would average the others."""
        known, ignored = {id(parameter) for parameter in self.parameters.values()}, ignored_names(self.module)
        for name, parameter in self.module.named_parameters():
            clean = _clean(name, self.kind.prefix)
            if parameter.requires_grad and id(parameter) not in known and clean not in ignored:
                was = (
                    "was frozen"
                    if clean in self.frozen
                    else "was replaced"
                    if clean in self.parameters
                    else "was missing"
                )
                raise ConfigError(
                    f"{clean} {was} when thinwire was attached and requires gradients, which nobody averages; detach() and "
                    "attach() again after unfreezing, adding or replacing parameters"
                )

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
    given = optimizer if isinstance(optimizer, list | tuple) else () if optimizer is None else (optimizer,)
    parameters = _trainable(module, kind)
    optimizers = tuple(unwrap_optimizer(one) for one in given)
    return Target(kind, module, parameters, optimizers, _sparse_names(module, parameters), _frozen_names(module, kind))


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


def _trainable(module: nn.Module, kind: Kind) -> dict[str, nn.Parameter]:
    """Parameters by clean name: wrappers such as DDP and torch.compile add prefixes that a checkpoint must not have."""
    ignored = ignored_names(module)
    named = [(_clean(name, kind.prefix), p) for name, p in module.named_parameters() if p.requires_grad]
    parameters = {name: p for name, p in named if name not in ignored}
    if not parameters:
        raise ConfigError(f"{type(module).__name__} has no parameter that requires gradients; nothing to attach to")
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name} has no shape yet (a lazy module); run one forward pass, then attach")
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ConfigError(
                f"{name} is {parameter.dtype}; only floating-point and complex parameters can be averaged"
            )
    return parameters


def ignored_names(module: nn.Module) -> frozenset[str]:
    """Parameters that DDP was told to leave alone, or averages itself (``delay_all_reduce_named_params``)."""
    return frozenset(getattr(module, "parameters_to_ignore", ()))


def _frozen_names(module: nn.Module, kind: Kind) -> frozenset[str]:
    return frozenset(_clean(name, kind.prefix) for name, p in module.named_parameters() if not p.requires_grad)


def _sparse_names(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    weights = {id(embedding.weight) for embedding in embeddings}
    return frozenset(name for name, parameter in parameters.items() if id(parameter) in weights)


def _clean(name: str, prefix: str) -> str:
    return ".".join(part for part in name.removeprefix(prefix).split(".") if part != "_orig_mod")
