"""Synchronise in every step: gradients are averaged in backward, and replicas stay equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.core import CheckpointError
from thinwire.observe.metrics import WireStats
from thinwire.sync.context import Context


@dataclass(frozen=True)
class EveryStep:
    """Plain data parallelism."""

    exchanges_gradients = True

    def bind(self, context: Context) -> Idle:
        return Idle()


@dataclass(frozen=True)
class Idle:
    """Nothing is left to do: replicas are equal, or there is only one.

    Args:
        is_local: gradients stay on this rank, which is alone.
        lines: what to tell people.
    """

    is_local: bool = False
    lines: Sequence[str] = ()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def stepped(self, optimizer: torch.optim.Optimizer) -> None: ...

    def after_step(self, *, taken: bool) -> None: ...

    def report_loss(self, loss: float) -> None: ...

    def averaged(self, *, exact: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def stats(self) -> WireStats:
        return WireStats()

    def explain(self) -> Sequence[str]:
        return self.lines

    def state_dict(self) -> None:
        return None

    def check_state(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            raise CheckpointError(f"the checkpoint's sync is {state.get('policy')!r}, expected 'every_step'")

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None: ...
