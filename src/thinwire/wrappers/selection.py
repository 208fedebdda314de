"""What all layer selections share: the layers picked at the end of a step are exchanged in the next, the others wait."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import (
    RESIDUAL,
    AllReduce,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Layout,
    Role,
    Schedule,
    State,
    Step,
    TensorSpec,
    UnitSpec,
    Wrapper,
    residual_key,
)
from thinwire.core.part import Part
from thinwire.core.side_by_side import ask, side_by_side
from thinwire.wrappers.layers import Layers, layers_of, spend

SAME_EVERYWHERE = Layout(lambda tensor: 1, Role.REPLICATED)
_OWN_KEYS = ("layer_picked", "layer_age", "layer_credit")
_LARGEST = 1e37  # sums over many ranks stay finite


@dataclass(frozen=True, kw_only=True)
class LayerSelection(Wrapper):
    """Base of the layer selections: subclasses say how layers are ranked.

    A layer is one module's parameters; tiny neighbours are merged. Biases, norms and small tensors always go. Picked
    layers are exchanged by the wrapped compressor. The others send nothing: their gradient is added to the residual, and
    their mean is zero, which optimizers of ``thinwire.optim`` take for "not received". What is picked for a step was fixed
    at the end of the step before, from numbers that were reduced over the ranks.

    The choice is among the layers that travel together: *the result depends on the grouping*. In every group the bytes
    keep to the budget on average; a layer larger than what a step allows is paid for in the steps after it.

    Args:
        budget: fraction of the bytes that may be sent. Lower: fewer bytes, older updates.
        warmup: in the first so many steps all layers go; over as many again the budget falls to its value. 0: none.
        max_age: a layer that has waited for so many steps goes in any case.
        always_bytes: tensors smaller than this always go.
        merge_bytes: neighbours are merged to layers of this size.
    """

    scheduled = ("budget",)

    budget: float = 0.3
    warmup: int = 50
    max_age: int = 8
    always_bytes: int = 16 * 1024
    merge_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        bounds = self.budget.bounds if isinstance(self.budget, Schedule) else (self.budget,)
        if not all(0 < bound <= 1 for bound in bounds):
            raise ConfigError(f"{self.name}: budget is {self.budget}; expected a fraction above 0 and at most 1")
        if not all((self.max_age + 1) * bound >= 1 for bound in bounds):
            least = math.ceil(1 / min(bounds)) - 1
            raise ConfigError(
                f"{self.name}: max_age is {self.max_age}, so old layers alone would exceed the budget of {min(bounds)}; "
                f"expected max_age={least} or more"
            )
        if min(self.warmup, self.always_bytes, self.merge_bytes) < 0:
            raise ConfigError(f"{self.name}: warmup, always_bytes and merge_bytes cannot be negative")
        self._check_inner()

    def _check_inner(self) -> None:
        inner = self.inner.layout()
        taken = [key for key in _OWN_KEYS if key in inner]
        if taken:
            raise ConfigError(f"{self.name} cannot select inside another selection; write only one of them")
        accumulated = [key for key, layout in inner.items() if layout.elementwise and layout.role is Role.PER_RANK]
        if accumulated:
            raise ConfigError(
                f"{self.name}: {self.inner} accumulates gradients ({', '.join(accumulated)}) and would miss those of "
                "steps in which a layer is not picked; put momentum first, as in "
                f"'momentum | {self.name} | topk(density=0.01)'"
            )

    @abstractmethod
    def numbers(self, x: Tensor, layers: Layers, state: State, step: Step) -> Tensor | None:
        """What this rank has measured, flat fp32, to be averaged over the ranks; None: nothing. ``x`` stays as it is."""

    @abstractmethod
    def rank_layers(
        self, agreed: Tensor | None, layers: Layers, ages: Sequence[int], state: State, step: Step
    ) -> tuple[list[float], State]:
        """A priority for each layer, and what becomes of the subclass's own replicated state (``extra_layout``)."""

    def extra_layout(self) -> Mapping[str, Layout]:
        """State of the subclass's own."""
        return {}

    def extra_state(self, unit: UnitSpec) -> State:
        """That state before the first step."""
        return {}

    def after_mean(self, mean: Tensor, picked: Part, state: State) -> State:
        """Own state that follows what was received."""
        return {}

    @property
    def exact_bytes(self) -> bool:
        return False

    @property
    def sparse(self) -> bool:
        return True

    @property
    def residual_name(self) -> str:
        """Where what waits is kept: in the residual of what is inside, or else here."""
        return residual_key(self.inner.layout()) or "residual"

    @property
    def _keeps_residual(self) -> bool:
        return residual_key(self.inner.layout()) is None

    def route(self, tensor: TensorSpec) -> Compressor:
        routed = self.inner.route(tensor)
        if 4 * tensor.numel < self.always_bytes or len(tensor.shape) < 2:
            return routed
        return self if routed is self.inner else replace(self, inner=routed)

    def init(self, unit: UnitSpec) -> State:
        count, device = len(unit.tensors), unit.device
        own = {self.residual_name: torch.zeros(unit.numel, device=device)} if self._keeps_residual else {}
        return {
            "layer_picked": torch.ones(count, dtype=torch.bool, device=device),
            "layer_age": torch.zeros(count, dtype=torch.int64, device=device),
            "layer_credit": torch.zeros(count, dtype=torch.float64, device=device),
            **own,
            **self.extra_state(unit),
            **self.inner.init(unit),
        }

    def layout(self) -> Mapping[str, Layout]:
        own = {self.residual_name: RESIDUAL} if self._keeps_residual else {}
        return {**dict.fromkeys(_OWN_KEYS, SAME_EVERYWHERE), **own, **self.extra_layout(), **self.inner.layout()}

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        now, layers = self.at(step.index), layers_of(step.unit, self.merge_bytes)
        flags = state["layer_picked"].tolist()
        picked, waiting = (
            Part(step.unit, tuple(i for i, on in enumerate(flags) if on is side)) for side in (True, False)
        )
        measured = now.numbers(x, layers, state, step)
        kept = torch.add(waiting.take(x), waiting.take(state[self.residual_name]))
        if not kernels.all_finite(kept):
            # An overflow would stay in the residual, and every step after this one would be skipped.
            step.refuse(kept)
        sending = picked.exchange(self.inner, self._given(x, state), state, step) if picked.members else _nothing(x)
        talks = [sending] if measured is None else [sending, ask(AllReduce(_finite(measured)))]
        done, *agreed = yield from side_by_side(talks)

        mean = picked.put(done.mean, torch.zeros_like(x)) if picked.members else torch.zeros_like(x)
        after = self._inner_after(done, picked, waiting, kept, state)
        after.update(self.after_mean(mean, picked, state))
        after.update(now._choose(agreed[0] if agreed else None, layers, state, step))
        lost = None if done.residual is None else picked.put(done.residual, torch.zeros_like(x))
        return Exchanged(mean, lost, after)

    def _given(self, x: Tensor, state: State) -> Tensor:
        """What picked layers send: with what has waited, where nothing inside adds it."""
        return x + state[self.residual_name] if self._keeps_residual else x

    def _inner_after(self, done: Exchanged, picked: Part, waiting: Part, kept: Tensor, state: State) -> State:
        """The state of what is inside, and all residuals, after the exchange."""
        inner = self.inner.layout()
        after = picked.put_state(done.state, state, inner) if picked.members else {key: state[key] for key in inner}
        key = self.residual_name
        residual = torch.zeros_like(state[key]) if self._keeps_residual else after[key]
        if waiting.members:
            # A copy: where nothing was picked this is still the old state, which must survive a skipped step.
            residual = waiting.put(kept, residual.clone())
        return {**after, key: residual}

    def _choose(self, agreed: Tensor | None, layers: Layers, state: State, step: Step) -> State:
        """The layers of the next step."""
        age = torch.where(state["layer_picked"], 0, state["layer_age"] + 1)
        by_tensor = age.tolist()
        ages = [max(by_tensor[tensor] for tensor in tensors) for tensors in layers.members]
        priorities, extra = self.rank_layers(agreed, layers, ages, state, step)
        total = max(1, sum(layers.elems))
        budget = self._budget(step.index + 1)
        credit = float(state["layer_credit"].sum()) / total + budget
        forced = [budget >= 1 or one >= self.max_age for one in ages]
        picked, left = spend(layers.shares, forced, priorities, credit)
        sizes = torch.tensor(step.unit.sizes, dtype=torch.float64, device=age.device)
        return {
            "layer_picked": torch.tensor(layers.spread(picked), dtype=torch.bool, device=age.device),
            "layer_age": age,
            "layer_credit": sizes * (0.0 if budget >= 1 else left),
            **extra,
        }

    def _budget(self, index: int) -> float:
        """The budget of a step, with the warm-up."""
        budget = self.budget.at(index) if isinstance(self.budget, Schedule) else float(self.budget)
        if not self.warmup:
            return budget
        fallen = min(1.0, max(0.0, index / self.warmup - 1))
        return 1 + fallen * (budget - 1)

    def numbers_bytes(self, layers: Layers, world_size: int) -> int:
        """What the numbers cost that the choice is made from."""
        return 0

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        """On average over the steps after the warm-up."""
        measured = self.numbers_bytes(layers_of(unit, self.merge_bytes), world_size)
        return measured + round(float(self.budget) * self.inner.wire_bytes(unit, world_size))


def _finite(measured: Tensor) -> Tensor:
    return measured.nan_to_num(0.0).clamp(-_LARGEST, _LARGEST)


def _nothing(x: Tensor) -> Exchange:
    """The exchange of no layer at all."""
    yield from ()
    return Exchanged(x[:0], None, {})


def layer_norms(x: Tensor, unit: UnitSpec, layers: Layers) -> Tensor:
    """The Euclidean norm of every layer, fp64."""
    _, squares = kernels.segment_moments(x, unit.offsets)
    return torch.stack([squares[list(tensors)].sum() for tensors in layers.members]).sqrt()
