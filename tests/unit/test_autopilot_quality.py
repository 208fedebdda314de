"""What a plan may use is decided anew by what the ledger has measured since."""

from __future__ import annotations

from dataclasses import replace

import pytest

import thinwire.api  # noqa: F401  (fills the registry)
from thinwire.autopilot.expect import back_to_dense
from thinwire.autopilot.quality import MODEL, Measured, measured, requalified
from thinwire.plan import ErrorLedger, Plan, Quotas
from thinwire.plan.result import Candidate, now


def candidate(compress: str, step_s: float, error: float, verdict: str = "") -> Candidate:
    return Candidate(
        compress=compress,
        fuse="auto",
        step_s=step_s,
        wire_bytes=1,
        memory_bytes=0,
        messages=1,
        relative_error=error,
        allowed=verdict in ("", "chosen"),
        verdict=verdict,
    )


PLAN = Plan(
    compress="int4",
    fuse="auto",
    quality="safe",
    world_size=4,
    step_s=1.0,
    floor_s=0.9,
    dense_s=2.0,
    reasons=("because",),
    candidates=(
        candidate("dense", 2.0, 0.0),
        candidate("int8", 1.2, 1e-4),
        candidate("int4", 1.0, 0.01, "chosen"),
        candidate("coarse", 0.95, 0.06, "error over 5e-02"),
        candidate("large", 0.9, 1e-4, "keeps 10 MB, allowed 5 MB"),
    ),
    date=now(),
)


def test_nothing_changes_while_the_error_is_allowed() -> None:
    assert requalified(PLAN, Measured(noise_share=0.9, error=0.05)) is PLAN
    assert requalified(PLAN, Measured(noise_share=0.9, error=None)) is PLAN


def test_what_loses_too_much_is_left_for_the_next_best() -> None:
    plan = requalified(PLAN, Measured(noise_share=0.2, error=0.07))
    assert (plan.compress, plan.step_s) == ("int8", 1.2)
    assert "int4 loses 0.07 by now, where 0.05 is allowed: int8." in plan.explain()
    verdicts = {one.compress: one.verdict for one in plan.candidates}
    assert verdicts["int8"] == "chosen"
    assert verdicts["int4"] == "error over 5e-02"
    assert verdicts["large"] == "keeps 10 MB, allowed 5 MB", "refused for another reason"


def test_it_comes_back_only_far_below_the_limit() -> None:
    left = requalified(PLAN, Measured(noise_share=0.2, error=0.07))
    assert requalified(left, Measured(noise_share=0.9, error=1e-4)) is left, "0.07 is allowed, but not by far"
    assert requalified(PLAN, Measured(noise_share=0.9, error=0.01)) is PLAN, "so is the coarse one"
    quieter = replace(
        left, candidates=tuple(replace(one, relative_error=one.relative_error / 3) for one in left.candidates)
    )
    assert requalified(quieter, Measured(noise_share=0.9, error=1e-4)).compress == "coarse"


def test_what_was_close_or_tried_and_lost_is_not_judged_anew() -> None:
    """Nothing is allowed or refused now that was not before; predictions alone would choose int4 in both cases."""
    noise = Measured(noise_share=0.5, error=None)
    dense = replace(PLAN, compress="dense", step_s=2.0)
    assert requalified(dense, noise) is dense
    lost = back_to_dense(PLAN, observed_s=2.5, dense_s=2.0)
    assert requalified(lost, noise) is lost
    louder = replace(
        lost, candidates=tuple(replace(one, relative_error=one.relative_error / 3) for one in lost.candidates)
    )
    assert requalified(louder, noise).compress == "coarse", "which is new; int4 is still out"
    assert not next(one for one in lost.candidates if one.compress == "int4").allowed


def test_fast_has_no_limit() -> None:
    plan = replace(PLAN, quality="fast")
    assert requalified(plan, Measured(noise_share=0.0, error=9.0)) is plan


def test_the_ledger_speaks_of_the_mean_and_limits_of_one_rank() -> None:
    """Signal 1, noise 8 per rank, four ranks: the mean has 1 + 2. An error of 0.9 per rank is a tenth of 9."""
    ledger = ErrorLedger(Quotas(settle_steps=2))
    assert measured(ledger, 4) is None
    for _ in range(2):
        ledger.record(MODEL, "noise", 8 / 4, 3.0)
    assert measured(ledger, 4) == Measured(pytest.approx(8 / 9), None)
    for _ in range(2):
        ledger.record(MODEL, "compression", 0.9 / 4, 3.0)
    assert measured(ledger, 4) == Measured(pytest.approx(8 / 9), pytest.approx(0.1))
