"""Post-local SGD: Lin et al., Don't Use Large Mini-batches, Use Local SGD (ICLR'20)."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.sync.local import Local


@dataclass(frozen=True, kw_only=True)
class PostLocal(Local):
    """Average gradients in the first ``start`` steps, where weights move fastest, and weights every ``h`` steps after it.

    Args:
        start: steps of plain data parallelism; the paper switches at the first drop of the learning rate.
    """

    start: int = 200
