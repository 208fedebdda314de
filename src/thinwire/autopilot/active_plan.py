"""A plan with what is expected of it: what ranks agree on, and what checkpoints keep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.autopilot.watch import DRIFT
from thinwire.core import CheckpointError
from thinwire.plan.result import Plan


@dataclass(frozen=True)
class ActivePlan:
    """A plan in force.

    Args:
        order: all parameter names, in the order in which their gradients are ready.
        groups: as ``GroupPlan.to_json`` gives them, where the plan's fusion needs a profile; else they follow from ``order``.
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
    groups: Sequence[Mapping[str, Any]] | None = None

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps({**asdict(self), "plan": self.plan.to_json(), "order": list(self.order)})


def read_active_plan(text: str) -> ActivePlan:
    """What ``to_text`` wrote.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        values = json.loads(text)
        return ActivePlan(**{**values, "plan": Plan.from_json(values["plan"])})
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the plan in the checkpoint cannot be read ({error}); load what wire.state_dict() has given, unchanged"
        ) from error
