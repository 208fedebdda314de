"""A user's model by name: ``module:function``, which returns the model, a batch and, if needed, the loss."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from thinwire.core import ConfigError
from thinwire.plan.profiling import Loss, default_loss

_EXAMPLE = "something like 'train:make' for a function make() in train.py that returns (model, batch)"


def load_target(text: str) -> tuple[nn.Module, Any, Loss]:
    """Import and call what ``text`` names; a path such as ``./train.py:make`` works too.

    The function takes no arguments. A third value, the loss function, is called as ``loss_fn(model(inputs), targets)`` with
    a batch of (inputs, targets) if it takes two arguments that way, or as ``loss_fn(model, batch)`` if its first parameter
    is called ``model``.

    Raises:
        ConfigError: it cannot be found, or returns something else.
    """
    where, _, name = text.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigError(f"{text!r} names no function; write {_EXAMPLE}")
    function = getattr(_module(where), name, None)
    if not callable(function):
        raise ConfigError(f"{where} has no function {name!r}; write {_EXAMPLE}")
    made = function()
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
        raise ConfigError(f"{text} returned {_described(made)}; expected (model, batch) or (model, batch, loss_fn)")
    return made[0], made[1], default_loss if len(made) == 2 else _as_loss(made[2], text)


def _module(where: str) -> ModuleType:
    try:
        if where.endswith(".py"):
            return _from_file(Path(where))
        if str(Path.cwd()) not in sys.path:  # as "python -m" would have it
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(where)
    except (ImportError, SyntaxError, OSError) as error:
        raise ConfigError(
            f"cannot import {where!r}: {error}. Run from its folder, or give the path of the file"
        ) from error


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ConfigError(f"there is no file {path}; write {_EXAMPLE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _as_loss(function: Callable[..., Tensor], text: str) -> Loss:
    if not callable(function):
        raise ConfigError(f"{text} returned {type(function).__name__} as third value; expected a loss function")
    if not isinstance(function, nn.Module) and next(iter(inspect.signature(function).parameters), "") == "model":
        return function

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return function(model(inputs), targets)

    return loss


def _described(made: object) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(one).__name__ for one in made)})"
    return type(made).__name__
