"""AdaComp-style: selection by bins, against a slow twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contract.world import run_unit
from thinwire.compressors.contrib.adacomp import AdaComp
from thinwire.core import ConfigError, Step, TensorSpec, UnitSpec

UNIT = UnitSpec((TensorSpec("a", (10, 13)), TensorSpec("b", (5,)), TensorSpec("c", (64,))))


def slow(residual: Tensor, latest: Tensor, bin_elems: int, boost: float) -> list[int]:
    """Positions that are sent, bin by bin and entry by entry."""
    total, chosen = residual + latest, []
    for start, stop in zip(UNIT.offsets, UNIT.offsets[1:], strict=False):
        for first in range(start, stop, bin_elems):
            members = range(first, min(first + bin_elems, stop))
            largest = max(abs(float(total[i])) for i in members)
            boosted = {i: abs(float(total[i]) + (boost - 1) * float(latest[i])) for i in members}
            chosen += [i for i in members if largest > 0 and boosted[i] >= largest]
    return chosen


@pytest.mark.parametrize("bin_elems", [1, 7, 50])
def test_equals_its_slow_twin_over_several_steps(bin_elems: int) -> None:
    # Few distinct values: sums are exact and ties occur.
    gradients = [
        torch.randint(-4, 5, (UNIT.numel,), generator=torch.Generator().manual_seed(s)).float() for s in range(4)
    ]
    residual = torch.zeros(UNIT.numel)
    for done, latest in zip(
        run_unit(AdaComp(bin_elems=bin_elems), UNIT, [[g] for g in gradients]), gradients, strict=True
    ):
        chosen = slow(residual, latest, bin_elems, 2.0)
        expected = torch.zeros(UNIT.numel)
        expected[chosen] = (residual + latest)[chosen]
        assert torch.equal(done.results[0].mean, expected)
        residual = residual + latest - expected


def test_bins_of_zeros_send_nothing() -> None:
    x = torch.zeros(UNIT.numel)
    x[131] = -2.0
    assert AdaComp(bin_elems=5).select(x, Step(0, UNIT)).counts == (0, 1, 0)


def test_longer_bins_and_less_boost_send_fewer_entries() -> None:
    x = torch.randn(UNIT.numel, generator=torch.Generator().manual_seed(0))

    def sent(compressor: AdaComp) -> int:
        return int((run_unit(compressor, UNIT, [[x]])[0].results[0].mean != 0).sum())

    assert sent(AdaComp(bin_elems=50)) < sent(AdaComp(bin_elems=10))
    assert sent(AdaComp(bin_elems=50, boost=1.0)) < sent(AdaComp(bin_elems=50))


@pytest.mark.parametrize(
    ("arguments", "message"), [({"bin_elems": 0}, "bin_elems is 0"), ({"boost": 0.5}, "boost is 0.5")]
)
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdaComp(**arguments)  # type: ignore[arg-type]
