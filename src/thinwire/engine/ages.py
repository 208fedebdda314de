"""What arrived in the last step and how old it is: what an optimizer must know about sparse updates.

A sparsifier sends a coordinate once in a while, as the sum of what has accumulated since. The wire keeps, for every
coordinate of every tensor that travels sparse, how many steps that sum stands for: its *age*.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.core import Compressor, TensorSpec, residual_key
from thinwire.exchange import states
from thinwire.kernels.ages import MAX_AGE, count_ages


@dataclass(frozen=True)
class Received:
    """What a parameter has received in the last counted step.

    Args:
        ages: uint8, in the shape of the parameter: how many steps what arrived stands for, counted up to 200; 0 where
            nothing arrived. It belongs to the wire and is overwritten by the next step: clone it to keep it.
    """

    ages: Tensor

    @property
    def mask(self) -> Tensor:
        """Where something arrived; bool, in the shape of the parameter."""
        return self.ages != 0

    @property
    def indices(self) -> Tensor:
        """Flat positions of what arrived, ascending; int64."""
        return self.ages.reshape(-1).nonzero().squeeze(1)


class Wire(Protocol):
    """Whoever knows what its parameters have received: an attached wire, or its ages alone."""

    def received(self, parameter: Tensor) -> Received | None:
        """What the parameter received in the last step; None: all of it, one step old, as without a sparsifier."""


# benchmarks/convergence: four tasks, 500 steps; the figures are in docs/results/optimizers.md.
_MEASURED_COST = (
    "at density 0.05 stock AdamW ended 5 to 10 % above dense's evaluation loss, thinwire.optim.AdamW with "
    "topk(score='update') 0 to 3 %, about 1 % after a density warm-up"
)

# By the id of each parameter. A wire holds its parameters, so ids stay theirs while it lives, and its entries go with it.
_wires: weakref.WeakValueDictionary[int, Ages] = weakref.WeakValueDictionary()


def wire_of(parameter: Tensor) -> Wire | None:
    """The wire that averages this parameter's gradient; None: there is none, or it was detached."""
    return _wires.get(id(parameter))


class Ages:
    """The ages of one attached model.

    Args:
        parameters: what is averaged, by name; optimizers find this wire by them.
        tensors: their specs.
        compressor: what they are sent with; only tensors that it sends sparse have ages.
    """

    def __init__(self, parameters: Mapping[str, Tensor], tensors: Iterable[TensorSpec], compressor: Compressor) -> None:
        routed = {tensor: compressor.route(tensor) for tensor in tensors}
        self._since: dict[str, Tensor] = {}
        self._ages: dict[str, Tensor] = {}
        self._caps: dict[str, int] = {}
        self._received: dict[int, Received] = {}
        for tensor, chosen in routed.items():
            if chosen.sparse:
                self._since[tensor.fqn], self._ages[tensor.fqn] = _zeros(tensor), _zeros(tensor)
                # Without a residual nothing accumulates: what arrives is one step old, whenever the last one came.
                self._caps[tensor.fqn] = 1 if residual_key(chosen.layout()) is None else MAX_AGE
                self._received[id(parameters[tensor.fqn])] = Received(self._ages[tensor.fqn].view(tensor.shape))
        self._parameters = list(parameters.values())  # held, so that their ids stay theirs
        for parameter in self._parameters:
            _wires[id(parameter)] = self

    @property
    def names(self) -> Collection[str]:
        """The tensors that have ages."""
        return self._since.keys()

    def received(self, parameter: Tensor) -> Received | None:
        """See ``Wire.received``."""
        return self._received.get(id(parameter))

    def end_step(self, means: Mapping[str, Tensor]) -> None:
        """A step has ended that counts.

        Args:
            means: fp32, by name, of the tensors that some rank has used; the others have received nothing, and for them
                no time has passed. Names without ages are passed over.
        """
        for name, ages in self._ages.items():
            if name in means:
                count_ages(means[name].reshape(-1).float(), self._since[name], ages, cap=self._caps[name])
            else:
                ages.zero_()

    def skip_step(self) -> None:
        """A step was skipped on all ranks: nothing was received, nothing has become older."""
        for ages in self._ages.values():
            ages.zero_()

    def rollback(self) -> None:
        """Undo the last step: what arrived becomes as old as it was, everything else one step younger."""
        for name, since in self._since.items():
            ages = self._ages[name]
            before = torch.where(ages > 0, ages, since)
            since.copy_(torch.where(before > 0, before - 1, before))
            ages.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """By name, the steps since each coordinate was last received; the same on all ranks."""
        return {name: since.clone() for name, since in self._since.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where ``state`` was taken; nothing is changed if it does not fit, see ``check``."""
        self.check(state)
        for name, since in self._since.items():
            since.copy_(state[name])
        self.skip_step()

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError if these ages belong to other tensors."""
        check_ages(state, {name: since.numel() for name, since in self._since.items()})

    def reset(self) -> None:
        """Forget all ages, as is right when residuals are set to zero."""
        for since in self._since.values():
            since.zero_()
        self.skip_step()

    def detach(self) -> None:
        """Optimizers no longer find this wire: to them all gradients are dense again."""
        for parameter in self._parameters:
            if wire_of(parameter) is self:
                del _wires[id(parameter)]


def check_ages(state: Any, elems: Mapping[str, int]) -> None:
    """Raise CheckpointError if saved ages are not of these tensors, given by name and size."""
    states.check_names("ages", state, elems)
    for name, numel in elems.items():
        states.check_tensor(f"ages of {name}", state[name], numel, torch.uint8)


def aged_elems(tensors: Iterable[TensorSpec], compressor: Compressor) -> dict[str, int]:
    """The sizes of the tensors that have ages under this compressor, by name."""
    return {tensor.fqn: tensor.numel for tensor in tensors if compressor.route(tensor).sparse}


def reads_ages(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer says, by an attribute of this name, that it takes ages into account."""
    return bool(getattr(optimizer, "reads_ages", False))


def warn_if_blind(optimizers: Iterable[torch.optim.Optimizer], ages: Ages) -> None:
    """Say once that an optimizer takes a sum over many steps for the gradient of one, where that will happen."""
    blind = [optimizer for optimizer in optimizers if not reads_ages(optimizer)]
    if not ages.names or not blind:
        return
    kind = type(blind[0]).__name__
    replacement = f"thinwire.optim.{kind}" if kind in ("AdamW", "SGD") else "thinwire.optim.AdamW"
    warnings.warn(
        f"{kind} does not know how old the updates are that a sparsifier sends ({_MEASURED_COST}). Use {replacement} "
        "instead, or compress='int4', which sends everything; see docs/explanation/optimizers.md",
        stacklevel=3,
    )


def _zeros(tensor: TensorSpec) -> Tensor:
    return torch.zeros(tensor.numel, dtype=torch.uint8, device=tensor.device)
