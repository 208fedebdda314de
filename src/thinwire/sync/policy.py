"""What a policy is, and the policies by name."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from thinwire.core import ConfigError

# A new policy is one file and one line here: ``module:class``, imported when it is asked for.
_POLICIES = {
    "every_step": "thinwire.sync.every_step:EveryStep",
}


class Policy(Protocol):
    """When workers synchronise. It decides from step counts and from scalars that were reduced over the ranks, only."""

    @property
    def exchanges_gradients(self) -> bool:
        """Whether every backward pass averages its gradients; otherwise they stay local."""

    def after_step(self, step: int) -> None:
        """An optimizer step has ended; called in the training thread, on all ranks at the same step."""


def policies() -> Sequence[str]:
    """The names that ``attach(sync=...)`` takes."""
    return sorted(_POLICIES)


def parse_policy(text: str) -> Policy:
    """A policy from ``"every_step"`` or ``"name(argument=value)"``.

    Raises:
        ConfigError: wrong syntax, an unknown name, or an argument that does not exist or does not fit.
    """
    name, arguments = _read(text)
    if name not in _POLICIES:
        raise ConfigError(f"sync is {text!r}; expected one of {', '.join(policies())}")
    module, _, attribute = _POLICIES[name].partition(":")
    try:
        policy: Policy = getattr(import_module(module), attribute)(**arguments)
    except TypeError as error:
        raise ConfigError(f"sync is {text!r}: {error}") from None
    return policy


def _read(text: str) -> tuple[str, dict[str, Any]]:
    """Only literals are read, nothing is evaluated."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args:
            return tree.func.id, {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
        if isinstance(tree, ast.Name):
            return tree.id, {}
    except (AttributeError, SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    raise ConfigError(
        f"sync is {text!r}; expected a policy such as 'every_step', with arguments by name in parentheses"
    )
