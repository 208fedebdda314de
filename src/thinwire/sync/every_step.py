"""Synchronise in every step: gradients are averaged in backward, and replicas stay equal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EveryStep:
    """Plain data parallelism."""

    exchanges_gradients = True

    def after_step(self, step: int) -> None:
        """Nothing is left to do."""
