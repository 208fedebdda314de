"""Whether what a plan has chosen may stay: its measured error against its limit, while training goes on.

Pure functions of a ledger that is the same on every rank, so all ranks reach the same plan without a message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.plan.ledger import ErrorLedger
from thinwire.plan.price import DENSE
from thinwire.plan.result import Candidate, Plan
from thinwire.plan.search import DENSE_MARGIN, OVER_THE_LIMIT, error_limit, winner_of

MODEL = "all tensors"  # the unit under which a ledger records the whole model
READMIT_BELOW = 0.5  # of the limit: so far under it must the error be of what was over it before


@dataclass(frozen=True)
class Measured:
    """What the ledger says of the gradient of one rank.

    Args:
        noise_share: E‖g - G‖² / E‖g‖².
        error: ‖v - C(v)‖² / ‖g‖² of the compressor in use; None if it leaves no residual, or there are too few records.
    """

    noise_share: float
    error: float | None


def measured(ledger: ErrorLedger, ranks: int) -> Measured | None:
    """None while there are too few records.

    The ledger's errors are those of the mean over the ranks, and relative to it: with the signal S and the noise N of one
    rank, its noise is r = (N/P) / (S + N/P), and one rank's gradient is (S + N) / (S + N/P) = 1 - r + P·r as large.
    """
    if not ledger.settled(MODEL, "noise"):
        return None
    noise = ledger.relative(MODEL, "noise")
    local = 1 - noise + ranks * noise
    lost = ledger.relative(MODEL, "compression") if ledger.settled(MODEL, "compression") else None
    return Measured(ranks * noise / local, None if lost is None else ranks * lost / local)


def requalified(plan: Plan, found: Measured) -> Plan:
    """The plan with what is allowed by now; the same object if that changes nothing."""
    limit = error_limit(found.noise_share, plan.quality)
    if limit is None:
        return plan
    measured_error = {} if found.error is None else {plan.compress: found.error}
    candidates = {
        one.compress: _judged(one, measured_error.get(one.compress, one.relative_error), limit)
        for one in plan.candidates
    }
    if all(candidates[one.compress].allowed == one.allowed for one in plan.candidates):
        return plan  # other verdicts stay: a close choice, or one that was tried and lost, is not judged again
    winner = winner_of(candidates, DENSE_MARGIN)
    if winner.compress == plan.compress:
        return plan
    left = candidates[plan.compress]
    reason = f"{left.compress} loses {left.relative_error:.2g} by now, where {limit:.2g} is allowed: {winner.compress}."
    chosen = replace(winner, verdict="chosen")
    return plan.changed_to(chosen, reason, [chosen if one is winner else one for one in candidates.values()])


def _judged(one: Candidate, error: float, limit: float) -> Candidate:
    """Allowed or not; what was refused for its error must be far under the limit to be allowed again."""
    if one.compress == DENSE:
        return replace(one, verdict="")
    refused = one.verdict.startswith(OVER_THE_LIMIT)
    if not (one.allowed or refused):
        return one  # for another reason, which stands
    allowed = error <= (READMIT_BELOW * limit if refused else limit)
    verdict = "" if allowed else f"{OVER_THE_LIMIT} {limit:.0e}"
    return replace(one, relative_error=error, allowed=allowed, verdict=verdict)
