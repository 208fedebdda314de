"""DGC against its formula, written out slowly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contract.world import run_unit
from thinwire.compressors.dgc import DGC
from thinwire.core import ConfigError, TensorSpec, UnitSpec, make
from thinwire.fusion.prepare import prepare

UNIT = UnitSpec((TensorSpec("a", (10, 10)), TensorSpec("b", (60,))))


def _gradients(steps: int, world: int = 1) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(UNIT.numel, generator=generator) for _ in range(world)] for _ in range(steps)]


def _twin(gradients: list[Tensor], density: float, momentum: float) -> list[Tensor]:
    """What one rank applies, tensor by tensor and entry by entry."""
    applied = []
    u, v = torch.zeros(UNIT.numel), torch.zeros(UNIT.numel)
    for gradient in gradients:
        u = momentum * u + gradient
        v = v + u
        sent = torch.zeros(UNIT.numel)
        for start, size in zip(UNIT.offsets, UNIT.sizes, strict=False):
            for index in v[start : start + size].abs().topk(int(density * size)).indices:
                sent[start + index] = v[start + index]
        u[sent != 0], v[sent != 0] = 0, 0
        applied.append(sent)
    return applied


def test_equals_its_formula() -> None:
    gradients = _gradients(12)
    rounds = run_unit(DGC(density=0.1, momentum=0.7), UNIT, gradients)
    expected = _twin([one for (one,) in gradients], 0.1, 0.7)
    for done, mean in zip(rounds, expected, strict=True):
        assert torch.allclose(done.results[0].mean, mean, atol=1e-5)


def test_without_momentum_it_is_topk_with_feedback() -> None:
    gradients = _gradients(6, world=2)
    dgc, topk = (
        run_unit(one, UNIT, gradients) for one in (DGC(density=0.1, momentum=0.0), make("ef | topk(density=0.1)"))
    )
    for one, other in zip(dgc, topk, strict=True):
        assert torch.equal(one.results[0].mean, other.results[0].mean)


def test_masking_also_with_rounded_values() -> None:
    """Rounding leaves something of v where it was sent, but nothing of u."""
    compressor, gradients = DGC(density=0.1, values="int8"), _gradients(2)
    first, second = run_unit(compressor, UNIT, gradients)
    sent = first.results[0].state["sent"]
    assert first.results[0].state["residual"][sent].any()
    assert torch.equal(second.results[0].state["velocity"][sent], gradients[1][0][sent])
    untouched = ~sent
    carried = 0.9 * gradients[0][0] + gradients[1][0]
    assert torch.allclose(second.results[0].state["velocity"][untouched], carried[untouched])


def test_clips_each_tensor_by_the_root_of_the_world() -> None:
    gradients = [[10 * torch.ones(UNIT.numel)] * 4]
    gradients[0] = [torch.cat([one[:100], 1e-3 * one[100:]]) for one in gradients[0]]
    rounds = run_unit(DGC(density=0.1, clip=2.0), UNIT, gradients)
    large, small = rounds[0].results[0].state["velocity"].split(UNIT.sizes)
    assert float(large.norm()) == pytest.approx(2.0 / 4**0.5)
    assert torch.equal(small, gradients[0][0][100:]), "what is within the limit stays as it is"


def test_density_warms_up() -> None:
    compressor = make("dgc(density=warmup(0.5, 0.02, steps=8))")
    rounds = run_unit(compressor, UNIT, _gradients(10, world=2))
    counts = [int(done.results[0].state["sent"].sum()) for done in rounds]
    assert counts == [80, 80, 35, 35, 16, 16, 6, 6, 3, 3]
    for index, done in enumerate(rounds):
        assert done.sent_bytes == [compressor.at(index).wire_bytes(UNIT, 2)] * 2


def test_keeps_its_own_residual() -> None:
    assert str(prepare("dgc")) == "route | dgc(density=0.01)"
    assert prepare("dgc").sparse


@pytest.mark.parametrize(
    ("spec", "answer"), [("dgc(momentum=1.0)", "momentum is 1.0"), ("dgc(clip=-1.0)", "clip is -1.0")]
)
def test_mistakes_are_answered(spec: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        make(spec)
