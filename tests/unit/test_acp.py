"""ACP-SGD: half a power iteration per step, one collective, half the bytes."""

from __future__ import annotations

import pytest
import torch

from contract.world import run_unit
from thinwire.compressors.acp import ACP
from thinwire.core import AllReduce, ConfigError, Step, TensorSpec, UnitSpec, make

UNIT = UnitSpec((TensorSpec("a", (40, 30)), TensorSpec("conv", (8, 4, 3, 3))))


def low_rank(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    parts = [
        torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
        for rows, columns in ((40, 30), (8, 36))
    ]
    return torch.cat([part.reshape(-1) for part in parts])


def test_each_step_asks_for_one_reduction_of_p_or_of_q() -> None:
    compressor = ACP(rank=4)
    shapes = []
    for index in range(2):
        exchange = compressor.exchange(low_rank(3), compressor.init(UNIT), Step(index, UNIT))
        request = next(exchange)
        assert isinstance(request, AllReduce)
        shapes.append(request.tensor.numel())
        with pytest.raises(StopIteration):
            exchange.send(request.tensor)
    assert shapes == [4 * (40 + 8), 4 * (30 + 36)]


def test_a_matrix_of_the_same_rank_is_exact_from_the_second_step_on() -> None:
    x = low_rank(3)
    rounds = run_unit(ACP(rank=3), UNIT, [[x, x]] * 3)
    assert not torch.allclose(rounds[0].results[0].mean, x, atol=1e-2)
    for done in rounds[1:]:
        assert torch.allclose(done.results[0].mean, x, atol=1e-3)


def test_with_feedback_the_sum_of_what_is_applied_follows_a_full_rank_gradient() -> None:
    x = torch.randn(UNIT.numel, generator=torch.Generator().manual_seed(0))
    rounds = run_unit(make("ef | acp(rank=4)"), UNIT, [[x]] * 80)
    late = torch.stack([done.results[0].mean for done in rounds[40:]]).mean(dim=0)
    assert float((late - x).norm() / x.norm()) < 0.35


def test_bytes_are_half_of_those_of_powersgd() -> None:
    acp, powersgd = (make(f"{name}(rank=4)").wire_bytes(UNIT, 4) for name in ("acp", "powersgd"))
    assert acp == pytest.approx(powersgd / 2, rel=0.01)


def test_wire_bytes_are_the_mean_of_even_and_odd_steps() -> None:
    x = low_rank(3)
    sent = [done.sent_bytes[0] for done in run_unit(ACP(rank=4), UNIT, [[x] * 4] * 2)]
    assert sent[0] != sent[1]
    assert sum(sent) / 2 == ACP(rank=4).wire_bytes(UNIT, 4)


def test_rank_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank is 0"):
        ACP(rank=0)
