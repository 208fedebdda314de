"""A model as every planner sees it: when each gradient is ready, what a step computes, how noisy its gradients are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch

from thinwire.core import ConfigError, TensorSpec
from thinwire.core.schema import from_json, load_json, save_json, to_json

_REMEDY = "make it again with thinwire plan --save-profile"
WARMUP_STEPS = 2  # that no profile counts: they pay for connections, caches, allocations and DDP's new buckets


@dataclass(frozen=True)
class _Plain:
    """A tensor profile as JSON has it."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    ready_s: float


@dataclass(frozen=True)
class TensorProfile:
    """A gradient, and when it is there."""

    tensor: TensorSpec
    ready_s: float  # after the start of backward

    def to_plain(self) -> _Plain:
        """For JSON."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        tensor = self.tensor
        return _Plain(tensor.fqn, tensor.shape, dtype, str(tensor.device), self.ready_s)

    @classmethod
    def from_plain(cls, values: _Plain) -> TensorProfile:
        """What ``to_plain`` gave."""
        dtype = getattr(torch, values.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype is {values.dtype!r}, which this torch does not know")
        try:
            device = torch.device(values.device)
        except RuntimeError as error:
            raise ConfigError(f"device is {values.device!r}, which this torch does not know") from error
        if any(size < 0 for size in values.shape):
            raise ConfigError(f"shape is {values.shape}, expected no negative size")
        return cls(TensorSpec(values.fqn, values.shape, dtype, device), values.ready_s)


@dataclass(frozen=True)
class Noise:
    """The gradient of one tensor over one local batch b: signal and noise.

    With g = G + noise: ``signal_sq`` is ‖G‖², ``noise_sq`` is E‖g - G‖². McCandlish et al. (2018) call
    b·noise_sq/signal_sq the simple noise scale: the batch at which both are equal.
    """

    signal_sq: float
    noise_sq: float


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Medians of a few real steps on one rank.

    Args:
        tensors: in the order in which their gradients are ready, with seconds after the start of backward.
        flops: of forward and backward.
        memory_bytes: moved by forward and backward, an estimate.
        slowdown: how many times slower than alone the rank was (``Cluster.slowdown``) when this was measured.
        batch: samples of one rank and step.
        noise: by parameter name; empty where the batch could not be divided.
        errors: by spec and parameter name: ‖g - C(g)‖² / ‖g‖² of a real gradient.

    Raises:
        ConfigError: ready times that are negative or go back.
    """

    VERSION: ClassVar[int] = 1

    tensors: tuple[TensorProfile, ...]
    backward_s: float
    forward_s: float = 0.0
    optimizer_s: float = 0.0
    flops: float = 0.0
    memory_bytes: float = 0.0
    slowdown: float = 1.0
    batch: int = 1
    noise: Mapping[str, Noise] = field(default_factory=dict)
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(not left <= right for left, right in pairwise([0.0, *self.ready_s])):
            raise ConfigError("ready times must not be negative and must not go back; sort the tensors by ready_s")
        for name in ("forward_s", "backward_s", "optimizer_s", "flops", "memory_bytes"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 0")
        if not (self.slowdown > 0 and self.batch >= 1):
            raise ConfigError(
                f"slowdown is {self.slowdown} and batch {self.batch}; expected more than 0 and at least 1"
            )

    @classmethod
    def in_ready_order(cls, ready_s: Mapping[TensorSpec, float], **measured: Any) -> ModelProfile:
        """Tensors sorted by when they are ready; the other arguments are those of the class."""
        ordered = sorted(ready_s.items(), key=lambda item: item[1])
        return cls(tensors=tuple(TensorProfile(tensor, at_s) for tensor, at_s in ordered), **measured)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors alone, in ready order."""
        return tuple(one.tensor for one in self.tensors)

    @cached_property
    def ready_s(self) -> tuple[float, ...]:
        """The ready times alone."""
        return tuple(one.ready_s for one in self.tensors)

    @property
    def elems(self) -> int:
        """Parameters in all."""
        return sum(tensor.numel for tensor in self.specs)

    @property
    def compute_s(self) -> float:
        """The floor of a step: everything but communication."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def relative_noise(self) -> float | None:
        """Noise over signal of one rank's whole gradient; None if it was not measured."""
        if not self.noise:
            return None
        signal_sq = sum(one.signal_sq for one in self.noise.values())
        return sum(one.noise_sq for one in self.noise.values()) / max(signal_sq, 1e-30)

    @property
    def noise_scale(self) -> float | None:
        """The batch (samples over all ranks) at which noise and signal of the mean gradient are equal."""
        relative = self.relative_noise
        return None if relative is None else self.batch * relative

    def noise_share(self) -> float | None:
        """E‖g - G‖² / E‖g‖²: the part of a local gradient that is noise."""
        relative = self.relative_noise
        return None if relative is None else relative / (1 + relative)

    def error(self, spec: str) -> float | None:
        """‖g - C(g)‖² / ‖g‖² of the whole gradient; None if it was not measured for this spec."""
        if spec not in self.errors:
            return None
        # Without noise measurements nobody knows how large the gradients are: then every element counts the same.
        elems = {tensor.fqn: float(tensor.numel) for tensor in self.specs}
        sizes = {name: one.signal_sq + one.noise_sq for name, one in self.noise.items()} or elems
        lost = sum(self.errors[spec].get(name, 0.0) * size for name, size in sizes.items())
        return lost / max(sum(sizes.values()), 1e-30)

    def without(self, names: Collection[str]) -> ModelProfile:
        """The same step with fewer tensors to send."""
        return replace(self, tensors=tuple(one for one in self.tensors if one.tensor.fqn not in names))

    def scaled(self, factor: float) -> ModelProfile:
        """The same model on ranks that compute ``factor`` times slower."""
        times = {f: factor * getattr(self, f) for f in ("forward_s", "backward_s", "optimizer_s", "slowdown")}
        tensors = tuple(TensorProfile(one.tensor, factor * one.ready_s) for one in self.tensors)
        return replace(self, tensors=tensors, **times)

    def to_json(self) -> dict[str, Any]:
        """Plain values with a version."""
        plain: dict[str, Any] = to_json(self)
        return plain

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelProfile:
        """What ``to_json`` described.

        Raises:
            ConfigError: written by another version, or no profile at all.
        """
        return from_json(cls, values, what="model profile", remedy=_REMEDY)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        save_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> ModelProfile:
        """Read what ``save`` wrote."""
        return cls.from_json(load_json(path, what="model profile", remedy=_REMEDY))
