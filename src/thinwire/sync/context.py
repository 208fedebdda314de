"""What a policy is bound to: one attached model on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from thinwire.comm.link import Link
from thinwire.core import Compressor, TensorSpec
from thinwire.engine.base import Engine
from thinwire.exchange.channel import Channel
from thinwire.exchange.membership import Fixed
from thinwire.fusion.groups import GroupPlan
from thinwire.observe.observer import Observers


@dataclass(frozen=True)
class Context:
    """The model, and the way to the other ranks.

    Args:
        parameters: that are trained, by name.
        statistics: of normalisation layers, by name: averaged, but nobody's optimizer moves them.
        link: that channels of a policy send over. On gloo it is not the gradients' one, so that neither waits for the other.
        engine: its ``exchanging`` says whether backward passes average gradients.
        check: raises ConfigError if the module has other parameters by now.
    """

    parameters: Mapping[str, nn.Parameter]
    statistics: Mapping[str, Tensor]
    optimizers: Sequence[torch.optim.Optimizer]
    link: Link
    engine: Engine
    seed: int = 0
    observers: Observers = field(default_factory=Observers)
    check: Callable[[], None] = lambda: None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that is averaged, by name."""
        return {**self.parameters, **self.statistics}

    def channel(
        self, tensors: Sequence[TensorSpec], compressor: Compressor, groups: Sequence[GroupPlan], scalars: Sequence[str]
    ) -> Channel:
        """The channel of deltas. They are no gradients: no loss scale, no ages, no weights to look at."""
        return Channel("outer", tensors, Fixed(self.link), compressor, groups, seed=self.seed, scalars=scalars)
