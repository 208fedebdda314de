"""Synchronise in every step: gradients are averaged in backward, and replicas stay equal."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.sync.context import Context
from thinwire.sync.policy import Bound


@dataclass(frozen=True)
class EveryStep:
    """Plain data parallelism."""

    exchanges_gradients = True

    def bind(self, context: Context) -> Bound:
        return Bound()
