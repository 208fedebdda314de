"""thinwire.optim.SGD: torch's own when all is dense; where it is not, the missed steps are made up for at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire.core import ConfigError
from thinwire.optim import SGD
from unit.optim_support import ages_of, parameters, receive

SETTINGS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"momentum": 0.5, "maximize": True, "weight_decay": 0.1},
    {"weight_decay": 0.1},
]


@pytest.mark.parametrize("settings", [*SETTINGS, {"momentum": 0.9, "dampening": 0.5}, {"fused": True}], ids=str)
def test_all_dense_is_torchs_bit_for_bit(settings: dict[str, Any]) -> None:
    mine, theirs = parameters(), parameters()
    wire = ages_of(mine, "int4")
    one, other = SGD(mine, lr=0.1, **settings), torch.optim.SGD(theirs, lr=0.1, **settings)
    for step in range(4):
        receive(mine, step, share=1.0, ages=wire)
        receive(theirs, step, share=1.0)
        one.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_everything_received_each_step_is_torchs_up_to_rounding(settings: dict[str, Any]) -> None:
    mine, theirs = parameters(), parameters()
    wire = ages_of(mine)
    one, other = SGD(mine, lr=0.1, **settings), torch.optim.SGD(theirs, lr=0.1, **settings)
    for step in range(10):
        receive(mine, step, share=1.0, ages=wire)
        receive(theirs, step, share=1.0)
        one.step()
        other.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str)
def test_a_sum_of_equal_gradients_moves_as_far_as_they_would_have_one_by_one(settings: dict[str, Any]) -> None:
    """Momentum carries over between receipts: two intervals of 3 and 5 steps against 8 dense steps."""
    mine, theirs = parameters(), parameters()
    wire = ages_of(mine)
    one, other = SGD(mine, lr=0.1, **settings), torch.optim.SGD(theirs, lr=0.1, **settings)
    gradients = [torch.randn(p.shape, generator=torch.Generator().manual_seed(7)) for p in mine]
    for age in (3, 5):
        for step in range(age):
            for p, g in zip(theirs, gradients, strict=True):
                p.grad = g.clone()
            other.step()
            sums = [g * age if step == age - 1 else torch.zeros_like(g) for g in gradients]
            for p, s in zip(mine, sums, strict=True):
                p.grad = s if p.dim() > 1 else gradients[1].clone()
            wire.end_step({f"p{index}": s for index, s in enumerate(sums)})
            one.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if settings.get("momentum"):
        torch.testing.assert_close(one.state[mine[0]]["momentum_buffer"], other.state[theirs[0]]["momentum_buffer"])


def test_momentum_does_not_move_what_was_not_received() -> None:
    given = parameters()
    wire = ages_of(given)
    optimizer = SGD(given, lr=0.1, momentum=0.9, weight_decay=0.1)
    receive(given, 0, ages=wire)
    optimizer.step()
    before, buffer = given[0].detach().clone(), optimizer.state[given[0]]["momentum_buffer"].clone()
    receive(given, 1, ages=wire)
    optimizer.step()
    received = wire.received(given[0])
    assert received is not None
    still = ~received.mask
    assert torch.equal(given[0][still], before[still])
    assert torch.equal(optimizer.state[given[0]]["momentum_buffer"][still], buffer[still])
    assert not torch.equal(given[0][~still], before[~still])


def test_dgc_masking_starts_anew_at_every_receipt() -> None:
    given = parameters()
    wire = ages_of(given)
    optimizer = SGD(given, lr=0.1, momentum=0.9, masking="dgc")
    for step in range(5):
        before = given[0].detach().clone()
        receive(given, step, share=1.0, ages=wire)
        optimizer.step()
    assert given[0].grad is not None
    torch.testing.assert_close(given[0].detach(), before - 0.1 * given[0].grad)


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ConfigError, match="masking is 'half'"):
        SGD(parameters(), masking="half")  # type: ignore[arg-type]
    given = parameters()
    wire = ages_of(given)
    optimizer = SGD(given, lr=0.1, momentum=0.9, dampening=0.5)
    receive(given, 0, ages=wire)
    with pytest.raises(ConfigError, match=r"dampening is 0\.5"):
        optimizer.step()


def test_states_go_both_ways() -> None:
    given = parameters()
    wire = ages_of(given)
    one = SGD(given, lr=0.1, momentum=0.9)
    receive(given, 0, ages=wire)
    one.step()
    stock = torch.optim.SGD(given, lr=0.1, momentum=0.9)
    stock.load_state_dict(one.state_dict())
    one.load_state_dict(stock.state_dict())
    assert one.masking == "age"
    receive(given, 1, ages=wire)
    one.step()
