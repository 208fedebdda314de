"""AdaComp-style: Chen et al., Adaptive Residual Gradient Compression for Data-Parallel Distributed Training (AAAI'18)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compressors.contrib.varying import VaryingSparsifier
from thinwire.core import (
    RESIDUAL,
    Compressor,
    ConfigError,
    Exchange,
    Exchanged,
    Layout,
    State,
    Step,
    UnitSpec,
    register,
)
from thinwire.core.blocks import from_blocks, to_blocks
from thinwire.kernels import Selected

_EXPECTED_PER_BIN = 10  # measured on a small transformer; only estimates use it


@register("adacomp")
@dataclass(frozen=True, kw_only=True)
class AdaComp(VaryingSparsifier):
    """Send, from every bin of neighbours, what the latest gradient g would lift to the bin's largest residual.

    G = residual + g; H = G + (boost - 1)·g; an entry goes where |H| >= max |G| of its bin. So bins at rest send one entry or
    none, bins in motion send several: how many is left to the data. The rule is the paper's as we understand it; it was not
    compared with code of the authors. Our own: values are sent as ``values`` says, where the paper sends a sign and one scale
    per layer, and all layers share one bin length, where the paper takes 50 for convolutions and 500 elsewhere.

    The rule needs residual and gradient apart, so this compressor keeps its residual itself; ``ef`` and ``noef`` do nothing.

    Args:
        bin_elems: neighbours that compete. Higher: fewer bytes.
        boost: how much the latest gradient counts. Higher: more bytes.
    """

    feedback = False

    bin_elems: int = 500
    boost: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bin_elems < 1:
            raise ConfigError(f"adacomp: bin_elems is {self.bin_elems}; expected 1 or more, for example 500")
        if not self.boost >= 1:
            raise ConfigError(f"adacomp: boost is {self.boost}; expected 1 (only the residual counts) or more")

    def init(self, unit: UnitSpec) -> State:
        device = unit.tensors[0].device if unit.tensors else torch.device("cpu")
        return {"residual": torch.zeros(unit.numel, device=device)}

    def layout(self) -> Mapping[str, Layout]:
        return {"residual": RESIDUAL}

    def exchange(self, x: Tensor, state: State, step: Step) -> Exchange:
        total, _ = kernels.compensate(x, state["residual"])
        mean, residual = yield from self.average(self._choose(total, x, step.unit), step)
        return Exchanged(mean, None, {"residual": residual})

    def select(self, x: Tensor, step: Step) -> Selected:
        """What goes in a first step, where nothing waits in a residual."""
        return self._choose(x, x.clone(), step.unit)

    def _choose(self, total: Tensor, latest: Tensor, unit: UnitSpec) -> Selected:
        """The entries of ``total`` that go, taken out of it."""
        boosted = torch.add(total, latest, alpha=self.boost - 1).abs()
        margin = boosted.sub_(self._bin_largest(total, unit))
        indices = (margin >= 0).nonzero().squeeze(1)
        bounds = torch.searchsorted(indices, torch.tensor(unit.offsets, device=indices.device))
        values, finite = total[indices], kernels.all_finite(total)
        total[indices] = 0
        return Selected(values, indices.to(torch.int32), tuple(bounds.diff().tolist()), total, finite)

    def _bin_largest(self, total: Tensor, unit: UnitSpec) -> Tensor:
        """For every entry the largest magnitude in its bin, infinity in a bin of zeros; a last bin may be shorter."""
        aligned = to_blocks(total, unit, self.bin_elems)
        padded = torch.nn.functional.pad(aligned, (0, -aligned.numel() % self.bin_elems))
        largest = padded.view(-1, self.bin_elems).abs().amax(dim=1, keepdim=True)
        largest = torch.where(largest > 0, largest, torch.inf)
        return from_blocks(largest.expand(-1, self.bin_elems).reshape(-1), unit, self.bin_elems)

    def selected_elems(self, unit: UnitSpec) -> int:
        bins = sum(-(-size // self.bin_elems) for size in unit.sizes)
        return min(unit.numel, _EXPECTED_PER_BIN * bins)

    @classmethod
    def examples(cls) -> Sequence[Compressor]:
        return [cls(bin_elems=50), cls(bin_elems=500, values="bf16")]
