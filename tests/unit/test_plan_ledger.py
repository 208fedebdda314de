"""The error ledger: shares of the noise, advice with hysteresis, and the same state after a round trip."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core import ConfigError
from thinwire.plan import ErrorLedger, Quotas
from thinwire.plan.ledger import tightened

ERRORS = st.floats(min_value=0, max_value=1e6)


def booked(noise: float, error: float, steps: int = 60, quotas: Quotas | None = None) -> ErrorLedger:
    ledger = ErrorLedger(quotas)
    for _ in range(steps):
        ledger.record("w", "noise", noise, 1.0)
        ledger.record("w", "compression", error, 1.0)
    return ledger


@pytest.mark.parametrize(
    ("error", "advice"),
    [(0.5, "tighten"), (0.11, "tighten"), (0.09, "keep"), (0.03, "keep"), (0.02, "relax"), (0.0, "relax")],
)
def test_advice_follows_the_share_of_the_noise(error: float, advice: str) -> None:
    assert booked(noise=1.0, error=error).advice("w", "compression") == advice


def test_errors_are_relative_to_the_gradient() -> None:
    ledger = ErrorLedger()
    ledger.record("w", "noise", 8.0, 4.0)
    ledger.record("w", "compression", 1.0, 4.0)
    assert ledger.relative("w", "compression") == pytest.approx(0.25)
    assert ledger.share("w", "compression") == pytest.approx(0.125)


@given(ERRORS, st.integers(min_value=1, max_value=30))
def test_a_constant_error_is_its_own_mean_from_the_first_step_on(error: float, steps: int) -> None:
    assert booked(1.0, error, steps).relative("w", "compression") == pytest.approx(error, rel=1e-9, abs=1e-12)


def test_nothing_changes_before_it_has_settled() -> None:
    assert booked(1.0, 5.0, steps=49).advice("w", "compression") == "keep"
    assert booked(1.0, 5.0, steps=50).advice("w", "compression") == "tighten"
    ledger = booked(1.0, 5.0)
    ledger.changed("w", "compression")
    assert ledger.advice("w", "compression") == "keep"
    assert ledger.relative("w", "noise") == pytest.approx(1.0)  # the noise is not the controller's


def test_without_noise_there_is_no_quota() -> None:
    ledger = ErrorLedger(Quotas(settle_steps=1))
    ledger.record("w", "compression", 5.0, 1.0)
    assert ledger.advice("w", "compression") == "keep"
    assert ledger.share("w", "compression") == math.inf


def test_steps_that_say_nothing_are_left_out() -> None:
    ledger = booked(1.0, 0.05)
    before = ledger.to_json()
    for error, size in ((1.0, 0.0), (math.inf, 1.0), (1.0, math.nan)):
        ledger.record("w", "compression", error, size)
    assert ledger.to_json() == before


def test_the_worst_unit_is_named() -> None:
    ledger = booked(1.0, 0.05)
    ledger.record("v", "noise", 1.0, 1.0)
    ledger.record("v", "compression", 0.2, 1.0)
    assert ledger.worst("compression") == ("v", pytest.approx(0.2))
    assert ledger.worst("drift") is None


@given(st.lists(st.tuples(ERRORS, st.floats(min_value=1e-3, max_value=1e6)), max_size=20))
def test_json_goes_on_where_it_stopped(steps: list[tuple[float, float]]) -> None:
    ledger, other = ErrorLedger(), ErrorLedger()
    for error, size in steps:
        ledger.record("w", "compression", error, size)
    other.load_json(json.loads(json.dumps(ledger.to_json())))
    for one in (ledger, other):
        one.record("w", "compression", 1.0, 1.0)
    assert other.to_json() == ledger.to_json()


def test_mistakes_are_messages() -> None:
    with pytest.raises(ConfigError, match="no term"):
        ErrorLedger().record("w", "luck", 1.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="negative"):
        ErrorLedger().record("w", "noise", -1.0, 1.0)
    with pytest.raises(ConfigError, match="quota"):
        Quotas(compression=0.0)
    with pytest.raises(ConfigError, match="decay"):
        Quotas(decay=1.0)
    with pytest.raises(ConfigError, match="version"):
        ErrorLedger().load_json({"version": 0})


def test_settings_move_one_factor_within_their_bounds() -> None:
    assert tightened(0.01, "tighten", least=0.001, most=0.1) == 0.02
    assert tightened(0.01, "relax", least=0.001, most=0.1) == 0.005
    assert tightened(0.08, "tighten", least=0.001, most=0.1) == 0.1
    assert tightened(0.01, "keep", least=0.001, most=0.1) == 0.01
