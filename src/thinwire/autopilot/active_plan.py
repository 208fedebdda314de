"""A plan with what is expected of it: what ranks agree on, and what checkpoints keep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.autopilot.watch import DRIFT
from thinwire.core import CheckpointError, ConfigError
from thinwire.core.schema import from_json, to_json
from thinwire.fusion.groups import GroupPlan
from thinwire.plan.ledger import ErrorLedger
from thinwire.plan.result import Plan

_REMEDY = "load what wire.state_dict() has given, unchanged"


@dataclass(frozen=True)
class ActivePlan:
    """A plan in force.

    Args:
        order: all parameter names, in the order in which their gradients are ready.
        groups: where the plan's fusion needs a profile; else they follow from ``order``.
        before_s: rank 0's part of a step before its first gradient, which does not depend on the network.
        expected_s: the step that the plan predicts, corrected by what was measured.
        dense_s: the same of dense.
        drift: how far off the steps may be, as a fraction of ``expected_s``.
        ledger: of the errors since, as ``ErrorLedger.to_json`` gives it; only in checkpoints.
    """

    plan: Plan
    order: Sequence[str]
    before_s: float
    expected_s: float
    dense_s: float
    drift: float = DRIFT
    ledger: Mapping[str, Any] | None = None
    groups: tuple[GroupPlan, ...] | None = None

    def __post_init__(self) -> None:
        if not (self.before_s >= 0 and min(self.expected_s, self.dense_s, self.drift) > 0):
            raise ConfigError(
                f"before_s is {self.before_s}, expected_s {self.expected_s}, dense_s {self.dense_s}, drift {self.drift}; "
                "expected the first at least 0 and the others above"
            )

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(to_json(self))


def read_active_plan(text: str) -> ActivePlan:
    """What ``to_text`` wrote.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        values = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the plan in the checkpoint is no JSON ({error}); {_REMEDY}") from error
    active = from_json(ActivePlan, values, what="plan in the checkpoint", remedy=_REMEDY, error=CheckpointError)
    if active.ledger is not None:
        try:
            ErrorLedger().load_json(active.ledger)
        except ConfigError as error:
            raise CheckpointError(f"the plan in the checkpoint does not fit: {error}") from error
    return active
