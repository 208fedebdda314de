"""What all engines share: the ``Engine`` protocol, and the gradients of one model as a channel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from thinwire.core import Compressor
from thinwire.engine.ages import Ages
from thinwire.engine.views import as_real
from thinwire.exchange.buffers import flatten
from thinwire.exchange.channel import Channel
from thinwire.exchange.transaction import Outcome, Transaction
from thinwire.fusion.groups import GroupPlan, Unit
from thinwire.observe.metrics import Totals
from thinwire.observe.observer import Observers
from thinwire.observe.report import StepReport

_FLOOR = 0.1  # of the mean deviation: coordinates that hardly ever had a gradient must not crowd out all others


class GradScaler(Protocol):
    """What is needed of ``torch.amp.GradScaler``."""

    def get_scale(self) -> float: ...


class Engine(Protocol):
    """Gradients of one kind of module into a channel and back into ``.grad``.

    Attributes:
        exchanging: False: gradients stay local, as sync policies want it between synchronisations.
    """

    exchanging: bool

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate gradients; the next one outside averages their sum."""

    def detach(self) -> None:
        """Remove all hooks."""


class Gradients:
    """The channel of a model's gradients, with what belongs to it alone: loss scale, ages, totals, observers.

    Args:
        parameters: by name.

    Attributes:
        between_steps: what runs between two steps on all ranks; engines call it where no optimizer of this rank steps.
        last: the report of the last settled transaction; None before the first.
        last_scalars: its scalars, by name and rank.
        scalars: what this rank sends with the next transaction, by the channel's names.
    """

    def __init__(
        self,
        channel: Channel,
        parameters: Mapping[str, nn.Parameter],
        *,
        scaler: GradScaler | None = None,
        observers: Observers | None = None,
    ) -> None:
        self.channel, self.parameters = channel, parameters
        self.ages = Ages(parameters, channel.tensors.values(), channel.compressor)
        self.observers = observers or Observers()
        self.totals = Totals()
        self.between_steps: Callable[[], None] = lambda: None
        self.last: StepReport | None = None
        self.last_scalars: Mapping[str, list[float]] = {}
        self.scalars: Mapping[str, float] = {}
        self._scaler = scaler
        self._applied: bool | None = None  # whether an optimizer has stepped since the last commit; None: none ever has
        self._used: Collection[str] = ()

    def begin(self) -> Transaction:
        """The transaction of a backward pass."""
        # Once per transaction: on CUDA get_scale() waits for the device.
        return self.channel.begin(scale=self._scaler.get_scale() if self._scaler is not None else 1.0)

    def close(self, transaction: Transaction, used: Collection[str] | None = None) -> None:
        """The end of a backward pass: the last group leaves."""
        transaction.close(used, self.scalars)

    def finish(self, transaction: Transaction) -> Outcome:
        """Wait for the means; then ages, totals and observers follow, before anything is handed to ``.grad``."""
        outcome = transaction.wait()
        self._used = outcome.used if outcome.committed else ()
        if self._applied is not None:
            self._applied = False
        if outcome.committed:
            self.ages.end_step({name: mean for name, mean in outcome.means.items() if name in outcome.used})
        else:
            self.ages.skip_step()
        self.last, self.last_scalars = outcome.report, outcome.scalars
        self.totals.add(outcome.report)
        self.observers.on_commit(outcome)
        self.observers.on_step(outcome.report)
        return outcome

    def applied(self) -> None:
        """An optimizer has stepped: what was averaged has been used."""
        self._applied = True

    def drop_discarded(self) -> None:
        """Before a forward pass: undo the last commit if the loop has thrown its gradients away.

        In a GAN the generator's backward also fills the discriminator's gradients, which are zeroed before its optimizer
        steps. Error feedback must not learn from them. All ranks run the same loop, and means are the same on all of them,
        so all roll back together.
        """
        if self._applied is False and self._used:
            gradients = (self.parameters[name].grad for name in self._used)
            if all(gradient is None or not bool(gradient.any()) for gradient in gradients):
                self.channel.rollback()
                self.ages.rollback()
                self._used = ()

    def use(self, compressor: Compressor | None = None, groups: Sequence[GroupPlan] | None = None) -> None:
        """Another compressor or other groups from the next step on. Ages go along where the tensor stays sparse."""
        self.channel.use(compressor, groups)
        if compressor is not None:
            since = self.ages.state_dict()
            self.renew_ages()
            fresh = self.ages.state_dict()
            self.ages.load_state_dict({name: since.get(name, zeros) for name, zeros in fresh.items()})

    def renew_ages(self) -> None:
        """Ages for the channel's compressor, from zero."""
        self.ages.detach()
        self.ages = Ages(self.parameters, self.channel.tensors.values(), self.channel.compressor)


class ParameterSide:
    """Weights, and what the optimizers know of them, for compressors that want to see these."""

    def __init__(self, parameters: Mapping[str, Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._parameters, self._optimizers = parameters, tuple(optimizers)

    def weights(self, unit: Unit) -> Tensor:
        return flatten(unit, {t.fqn: as_real(self._parameters[t.fqn].detach()) for t in unit.spec.tensors})

    def importance(self, unit: Unit) -> Tensor | None:
        """(√v + √v̄/10)^(-1/2) with Adam's second moment v, flat; None where no optimizer has one (yet) for some tensor.

        Adam makes a step of g/√v out of a gradient g. Ranking by |g|/√v itself would treat pure noise like signal, ranking
        by |g| leaves weights with small gradients waiting; half way in between trains best (docs/results/optimizers.md).
        """
        moments = {}
        for name in (tensor.fqn for tensor in unit.spec.tensors):
            states = (optimizer.state.get(self._parameters[name], {}) for optimizer in self._optimizers)
            found = next((state["exp_avg_sq"] for state in states if "exp_avg_sq" in state), None)
            if found is None:
                return None
            moments[name] = found
        flat = flatten(unit, moments).sqrt_()
        for part in flat.split(unit.spec.sizes):
            part.add_(_FLOOR * part.mean() + torch.finfo(torch.float32).tiny)
        return flat.rsqrt_()
