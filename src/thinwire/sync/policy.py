"""What a policy is, and the policies by name."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Protocol

import torch

from thinwire.core import CheckpointError, ConfigError
from thinwire.observe.metrics import Totals
from thinwire.sync.context import Context

# A new policy is one file and one line here: ``module:class``, imported when it is asked for.
_POLICIES = {
    "every_step": "thinwire.sync.every_step:EveryStep",
    "stream": "thinwire.sync.stream:Stream",
    "local": "thinwire.sync.local:Local",
    "post_local": "thinwire.sync.post_local:PostLocal",
    "slowmo": "thinwire.sync.slowmo:SlowMo",
    "adacomm": "thinwire.sync.adacomm:AdaComm",
    "diloco": "thinwire.sync.diloco:DiLoCo",
    "streaming_diloco": "thinwire.sync.streaming_diloco:StreamingDiLoCo",
    "sparseloco": "thinwire.sync.sparseloco:SparseLoCo",
    "sparta": "thinwire.sync.sparta:Sparta",
    "layerwise": "thinwire.sync.layerwise:Layerwise",
    "sapus": "thinwire.sync.sapus:SaPus",
    "momentum_k": "thinwire.sync.momentum_k:MomentumK",
}


class Bound:
    """A policy at work on one rank; this one has nothing to do, because replicas are equal anyway or there is only one.

    It decides from step counts and from scalars that were reduced over the ranks, only. Everything is called in the training
    thread, on all ranks at the same step unless said otherwise.

    Attributes:
        is_local: gradients stay on this rank at present.
        totals: what deltas have cost so far.
    """

    def __init__(self, *, is_local: bool = False) -> None:
        self._is_local = is_local
        self.totals = Totals()

    @property
    def is_local(self) -> bool:
        return self._is_local

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""

    def after_step(self, *, taken: bool) -> None:
        """A training step has ended; ``taken``: this rank has moved its weights."""

    def report_loss(self, loss: float) -> None:
        """The loss of this rank's step, for policies that adapt to it."""

    def averaged(self, *, exact: bool) -> AbstractContextManager[None]:
        """The agreed weights in place of this rank's own; ``exact``: the mean of the replicas, which all ranks ask for."""
        return nullcontext()

    def explain(self) -> Sequence[str]:
        """What is sent when, in lines."""
        return ["  one rank: nothing to average"] if self.is_local else []

    def state_dict(self) -> dict[str, Any] | None:
        """Everything that lasts from step to step."""
        return None

    def check_state(self, state: Mapping[str, Any] | None) -> None:
        """Raise CheckpointError unless this is a state of the same policy on the same model. Changes nothing."""
        if state is not None:
            found = state.get("policy") if isinstance(state, Mapping) else state
            raise CheckpointError(f"the checkpoint's sync is {found!r:.80}, expected 'every_step'")

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on where a state that was checked has been taken."""


class Policy(Protocol):
    """When workers synchronise: a frozen configuration."""

    @property
    def exchanges_gradients(self) -> bool:
        """Whether backward passes average their gradients, all of them or those before the first local step."""

    def bind(self, context: Context) -> Bound:
        """Put it to work on an attached model."""


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
