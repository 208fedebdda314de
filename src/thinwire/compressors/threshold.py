"""Hard threshold: Sahu et al., Rethinking Gradient Sparsification as Total Error Minimization (NeurIPS'21)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire import kernels
from thinwire.compressors.shared.sparse import Sparsifier, check_density
from thinwire.core import Compressor, ConfigError, Step, UnitSpec, register
from thinwire.formats import wire_format
from thinwire.kernels import Selected


@register("threshold")
@dataclass(frozen=True, kw_only=True)
class Threshold(Sparsifier):
    """Send every entry whose magnitude exceeds a fixed value; how many that are varies from step to step and rank to rank.

    Args:
        value: the magnitude above which an entry is sent. Higher: fewer bytes.
        density: the fraction expected to be sent; used for estimates only.
    """

    varying = True

    value: float = 1e-3
    density: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        if not self.value >= 0:
            raise ConfigError(f"threshold: value is {self.value}; expected a magnitude of 0 or more")
        if wire_format(self.values).bits < 8:
            raise ConfigError(
                f"threshold: {self.values} values need a count known beforehand; use int8, fp16, bf16 or fp32"
            )

    @property
    def exact_bytes(self) -> bool:
        return False

    def select(self, x: Tensor, step: Step) -> Selected:
        return kernels.ef_threshold_pack(x, None, step.unit.offsets, [self.value] * len(step.unit.tensors), out=x)

    def selected_elems(self, unit: UnitSpec) -> int:
        return int(self.density * unit.numel)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(value=1e-3), cls(value=0.5, values="bf16")]
