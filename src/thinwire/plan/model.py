"""A model as the planner sees it: when each gradient is ready, what a step computes, how noisy its gradients are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from thinwire.core import ConfigError, TensorSpec
from thinwire.fusion import Curve, Profile, TensorProfile

VERSION = 1
_NOTHING = Curve(((1.0, 0.0),))


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
    """

    tensors: tuple[TensorProfile, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float
    flops: float
    memory_bytes: float
    slowdown: float = 1.0
    batch: int = 1
    noise: Mapping[str, Noise] = field(default_factory=dict)
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors alone, in ready order."""
        return tuple(one.tensor for one in self.tensors)

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

    def scaled(self, factor: float) -> ModelProfile:
        """The same model on ranks that compute ``factor`` times slower."""
        values = {f: factor * getattr(self, f) for f in ("forward_s", "backward_s", "optimizer_s", "slowdown")}
        tensors = tuple(TensorProfile(one.tensor, factor * one.ready_s) for one in self.tensors)
        kept = {name: getattr(self, name) for name in ("flops", "memory_bytes", "batch", "noise", "errors")}
        return ModelProfile(tensors=tensors, **values, **kept)

    def to_json(self) -> dict[str, Any]:
        """Plain values with a version."""
        # Tensors are written as a fusion profile writes them: one format for both.
        tensors = Profile(self.tensors, _NOTHING, _NOTHING).to_json()["tensors"]
        names = ("forward_s", "backward_s", "optimizer_s", "flops", "memory_bytes", "slowdown", "batch")
        return {
            "version": VERSION,
            "tensors": tensors,
            **{name: getattr(self, name) for name in names},
            "noise": {name: asdict(one) for name, one in self.noise.items()},
            "errors": {spec: dict(by_name) for spec, by_name in self.errors.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelProfile:
        """What ``to_json`` described.

        Raises:
            ConfigError: written by another version, or no profile at all.
        """
        if values.get("version") != VERSION or "forward_s" not in values:
            raise ConfigError(
                f"this is no model profile of version {VERSION} (it says {values.get('version')!r}); "
                "make it again with thinwire plan --save-profile"
            )
        whole = {**Profile((), _NOTHING, _NOTHING).to_json(), "tensors": values["tensors"]}
        tensors = Profile.from_json(whole).tensors
        noise = {name: Noise(**one) for name, one in values["noise"].items()}
        rest = {key: value for key, value in values.items() if key not in ("version", "tensors", "noise")}
        return cls(tensors=tensors, noise=noise, **rest)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> ModelProfile:
        """Read what ``save`` wrote."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the model profile {path}: {error}") from error
        return cls.from_json(values)
