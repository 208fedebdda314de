"""Compressors: frozen configurations whose ``exchange`` is a coroutine over collectives.

Two laws hold for every compressor unless its class says otherwise:

* *agreement*: ``mean`` is bit-identical on all ranks;
* *conservation*: the mean over ranks of ``x - residual`` equals ``mean``; what is not applied is in a residual.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from thinwire.core.payload import Payload
from thinwire.core.request import AllGather, AllReduce, Partition, Request
from thinwire.core.schedule import Schedule
from thinwire.core.spec import TensorSpec, UnitSpec

State = dict[str, Tensor]
Self = TypeVar("Self", bound="Compressor")
W = TypeVar("W", bound="Wrapper")
Maturity = Literal["stable", "experimental"]
_ALWAYS_SHOWN = ("density", "rank", "bits")  # what people compare settings by, so it is printed even at its default


class Exchanged(NamedTuple):
    """What an exchange returns.

    ``residual`` is x minus what the other ranks decoded from this one; None means that nothing was lost.
    """

    mean: Tensor
    residual: Tensor | None
    state: State


Exchange = Generator[Request | tuple[Request, ...], Any, Exchanged]


class Role(Enum):
    """What a state tensor is, for code that resizes, hands over or stores states it knows nothing else about."""

    RESIDUAL = "residual"  # of this rank: gradient that waits to be sent; its sum over the ranks must not change
    PER_RANK = "per rank"  # of this rank, and of no meaning on another
    REPLICATED = "replicated"  # the same on all ranks: any copy will do


@dataclass(frozen=True)
class Layout:
    """How one state tensor is cut along the tensors of a unit, so that it can be stored under parameter names.

    ``numel(tensor)`` elements belong to each tensor, one after the other.
    """

    numel: Callable[[TensorSpec], int]
    role: Role = Role.PER_RANK

    @property
    def elementwise(self) -> bool:
        """One element for each of the gradient, whatever the role."""
        return self.numel is ELEMENTWISE.numel


ELEMENTWISE = Layout(lambda tensor: tensor.numel)
RESIDUAL = replace(ELEMENTWISE, role=Role.RESIDUAL)


def residual_key(layouts: Mapping[str, Layout]) -> str | None:
    """Under which key a state keeps what waits to be sent; None where it keeps nothing."""
    return next((key for key, layout in layouts.items() if layout.role is Role.RESIDUAL), None)


@dataclass(frozen=True)
class Step:
    """What an exchange may know about its surroundings.

    ``weights`` gives the parameters of the unit, flat like its gradient and not to be changed; only for compressors that
    ``need_weights``, and None where the driver of the exchange has none. It is a function because flattening them is a
    copy, and not every step looks at them. ``importance`` likewise says, for compressors that ``need_importance``, how much
    a unit of gradient matters to the optimizer at each coordinate. ``residual`` is to be added to the unit first; only for
    compressors whose ``adds_residual`` says so.
    """

    index: int
    unit: UnitSpec
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    weights: Callable[[], Tensor] | None = field(default=None, compare=False, repr=False)
    importance: Tensor | None = field(default=None, compare=False, repr=False)
    residual: Tensor | None = field(default=None, compare=False, repr=False)
    on_not_finite: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    def refuse(self, x: Tensor) -> None:
        """Before the first round: ``x`` is not finite. The driver of the exchange then has all ranks skip the step; what is
        sent for it does not matter, but must be well-defined, so ``x`` becomes zeros. Where nothing skips steps (a
        simulator) it stays as it is."""
        if self.on_not_finite is not None:
            self.on_not_finite()
            x.zero_()

    def generator(self, purpose: str = "", *, per_rank: bool = False) -> torch.Generator:
        """Random numbers that depend on seed, step, unit and purpose only (and on the rank if ``per_rank``).

        The global generator is never touched: the user's own randomness stays reproducible.
        """
        who = self.rank if per_rank else "all"
        text = f"{self.seed}/{self.index}/{self.unit.name}/{purpose}/{who}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=False) >> 1)


class Compressor(ABC):
    """Decides what a unit sends. Subclasses are frozen, keyword-only dataclasses: configuration, no state.

    Class attributes:
        name: the word in specs such as ``"topk(density=0.01)"``; set by ``@register``.
        maturity: ``stable`` once its effect was shown here on real tasks, otherwise ``experimental``.
        feedback: wrap in error feedback unless told otherwise.
        scheduled: fields that may be a function of the step (``thinwire.core.schedule``).
    """

    name: ClassVar[str]
    maturity: ClassVar[Maturity] = "experimental"
    feedback: ClassVar[bool] = False
    scheduled: ClassVar[tuple[str, ...]] = ()

    @property
    def exact_bytes(self) -> bool:
        """``wire_bytes`` is exact; otherwise it is an estimate: the size depends on the data or changes with the step."""
        return self.at(0) is self

    @property
    def needs_weights(self) -> bool:
        """The exchange wants to see the parameters in ``Step.weights``."""
        return False

    @property
    def needs_importance(self) -> bool:
        """The exchange wants to see ``Step.importance``."""
        return False

    @property
    def rounds(self) -> int | None:
        """In how many rounds it is done at most, where all of them are among all ranks and of sizes that these know
        beforehand; None: that is not so, or depends. Such rounds need not wait for those of other groups."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        """In which its units are flattened: fp32, but where something wider is sent as it is."""
        return torch.float32

    def partitions(self, rank: int, world_size: int) -> Sequence[Partition]:
        """The partitions of ranks that its requests name. A link makes their process groups before the first exchange."""
        return ()

    @property
    def checks_finite(self) -> bool:
        """The exchange calls ``Step.refuse``: it sees all values in a pass that it makes anyway. Else the driver checks."""
        return False

    def adds_residual(self, step: Step) -> bool:
        """The exchange adds ``Step.residual``, and checks that the sum is finite, in a pass that it makes anyway."""
        return False

    def at(self: Self, index: int) -> Self:
        """The configuration in force at a step: every schedule replaced by its value. ``self`` where there is none.

        ``compressor.at(index).wire_bytes(...)`` is the price of that step; without ``at`` it is that of the last value.
        """
        values = {name: getattr(self, name) for name in self.scheduled}
        current = {name: value.at(index) for name, value in values.items() if isinstance(value, Schedule)}
        return replace(self, **current) if current else self  # type: ignore[type-var]

    @property
    def sparse(self) -> bool:
        """A zero in the mean was sent by no rank in this step: that coordinate comes later, and older."""
        return False

    def init(self, unit: UnitSpec) -> State:
        """The state before the first step. Must be the concatenation of what the unit's tensors give one by one."""
        return {}

    def layout(self) -> Mapping[str, Layout]:
        """For each key of the state, how it divides among the unit's tensors."""
        return {}

    @abstractmethod
    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        """Average ``x`` (flat fp32, owned by the exchange: it may be overwritten) over the ranks."""

    @abstractmethod
    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        """Bytes that one rank sends in one step, without sending them."""

    def route(self, tensor: TensorSpec) -> Compressor:
        """Which compressor this tensor gets. Routers override it; everybody else takes what comes."""
        return self

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        """Configurations for tests, tables and benchmarks."""
        return [cls()]

    def __str__(self) -> str:
        return self._text(skip=())

    def _text(self, skip: Sequence[str]) -> str:
        shown = (f for f in fields(self) if f.name not in skip)  # type: ignore[arg-type]
        values = ((f.name, getattr(self, f.name), f.default) for f in shown)
        given = [(name, value) for name, value, default in values if name in _ALWAYS_SHOWN or value != default]
        arguments = ", ".join(f"{name}={value!r}" for name, value in given)
        return f"{self.name}({arguments})" if arguments else self.name


class Codec(Compressor):
    """The common case of one round: say how to encode and decode, and the exchange is provided.

    ``summable`` payloads have the same shape on all ranks and decode linearly: they are averaged on the wire.
    Others are gathered, decoded one by one and averaged.
    """

    summable: ClassVar[bool] = False
    varying: ClassVar[bool] = False

    @property
    def rounds(self) -> int | None:
        return 1 if type(self).exchange is Codec.exchange and not self.varying else None

    @abstractmethod
    def encode(self, x: Tensor, step: Step) -> Payload: ...

    @abstractmethod
    def decode(self, payload: Payload, unit: UnitSpec) -> Tensor: ...

    @abstractmethod
    def payload_bytes(self, unit: UnitSpec) -> int:
        """Size of what ``encode`` gives for this unit (with ``Payload.size``, for gathered payloads)."""

    def split(self, x: Tensor, step: Step) -> tuple[Payload, Tensor]:
        """The payload and what it leaves behind. Override where a kernel gives both in one pass."""
        payload = self.encode(x, step)
        return payload, x - self.decode(payload, step.unit)

    def combine(self, payloads: Sequence[Payload], step: Step) -> Tensor:
        """The mean of the decoded payloads, summed in rank order so that all ranks round alike."""
        total = self.decode(payloads[0], step.unit)
        for payload in payloads[1:]:
            total = total + self.decode(payload, step.unit)
        return total / len(payloads)

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        now = self.at(step.index)
        payload, residual = now.split(x, step)
        if self.summable:
            reduced = yield tuple(AllReduce(tensor) for tensor in payload.values())
            mean = now.decode(Payload(zip(payload, reduced, strict=True)), step.unit)
        else:
            gathered = yield AllGather(payload.to_bytes(), varying=self.varying)
            mean = now.combine([Payload.from_bytes(message) for message in gathered], step)
        return Exchanged(mean, residual, state)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        nbytes = self.payload_bytes(unit)
        return 2 * (world_size - 1) * nbytes // world_size if self.summable else (world_size - 1) * nbytes


@dataclass(frozen=True, kw_only=True)
class Wrapper(Compressor):
    """A compressor around another one, written before it in a spec: ``"momentum(mu=0.9) | topk(density=0.01)"``.

    Facts of what is inside (``rounds``, ``sparse``, ``needs_*``, ``exact_bytes``) hold for the wrapper too, unless it says
    otherwise. Promises (``checks_finite``, ``adds_residual``) are never passed on: the inside keeps them for what it is
    given, which need not be all that the wrapper was given, nor on the same device, nor of the same rank.
    """

    inner: Compressor

    def init(self, unit: UnitSpec) -> State:
        return self.inner.init(unit)

    def layout(self) -> Mapping[str, Layout]:
        return self.inner.layout()

    def inner_state(self, state: State) -> State:
        return {key: state[key] for key in self.inner.layout()}

    def partitions(self, rank: int, world_size: int) -> Sequence[Partition]:
        return self.inner.partitions(rank, world_size)

    def wire_bytes(self, unit: UnitSpec, world_size: int) -> int:
        return self.inner.wire_bytes(unit, world_size)

    def route(self, tensor: TensorSpec) -> Compressor:
        routed = self.inner.route(tensor)
        return self if routed is self.inner else replace(self, inner=routed)

    def at(self: W, index: int) -> W:
        current = super().at(index)
        inner = current.inner.at(index)
        return current if inner is current.inner else replace(current, inner=inner)

    @property
    def exact_bytes(self) -> bool:
        return self.inner.exact_bytes

    @property
    def needs_weights(self) -> bool:
        return self.inner.needs_weights

    @property
    def needs_importance(self) -> bool:
        return self.inner.needs_importance

    @property
    def rounds(self) -> int | None:
        return self.inner.rounds

    @property
    def sparse(self) -> bool:
        return self.inner.sparse

    def __str__(self) -> str:
        return f"{self._text(skip=('inner',))} | {self.inner}"
