"""The state of an attached wire: what a checkpoint keeps of it, and what is refused when one is loaded.

Holds only tensors, numbers, strings and None. A state that is refused has changed nothing: everything is validated before
anything is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.autopilot.active_plan import read_active_plan
from thinwire.autopilot.controller import Autopilot
from thinwire.core import CheckpointError
from thinwire.engine.ages import aged_elems, check_ages
from thinwire.engine.base import Gradients
from thinwire.fusion.prepare import prepare
from thinwire.plan.price import DENSE
from thinwire.sync.policy import Bound

VERSION = 5  # 2: ages; 3: plan, carried; 4: roles; 5: sync
READS = (3, 4, 5)
_KEYS = ("step", "seed", "fusion", "plan", "tensors", "carried", "ages")


def save(gradients: Gradients, autopilot: Autopilot | None, policy: Bound, chosen: str) -> dict[str, Any]:
    """This rank's state.

    Args:
        chosen: what the user asked to compress with.
    """
    channel, link = gradients.channel, gradients.channel.members.link()
    state = channel.state_dict()
    return {
        "version": VERSION,
        "rank": link.rank,
        "world_size": link.world_size,
        "compress": chosen,
        "step": state["index"],
        "seed": state["seed"],
        "fusion": state["groups"],
        "plan": autopilot.saved() if autopilot is not None else None,
        "tensors": state["tensors"],
        "roles": state["roles"],
        "carried": state["carried"],
        "ages": gradients.ages.state_dict(),
        "sync": policy.state_dict(),
    }


def load(
    state: Mapping[str, Any], gradients: Gradients, autopilot: Autopilot | None, policy: Bound, chosen: str
) -> None:
    """Go on exactly where ``state`` was taken.

    Raises:
        CheckpointError: it was taken of another model, compressor, rank or world size. Nothing is changed then.
    """
    channel, link = gradients.channel, gradients.channel.members.link()
    _check_header(state, {"rank": link.rank, "world_size": link.world_size, "compress": chosen})
    compressor = channel.compressor
    if chosen == "auto":
        compressor = prepare(DENSE if state["plan"] is None else read_active_plan(state["plan"]).plan.compress)
    elif state["plan"] is not None:
        read_active_plan(state["plan"])
    values = {**state, "index": state["step"], "groups": state["fusion"]}
    channel.check_state(values, compressor)
    check_ages(state["ages"], aged_elems(channel.tensors.values(), compressor))
    policy.check_state(state.get("sync"))
    channel.load_state_dict(values, compressor)
    gradients.renew_ages()
    gradients.ages.load_state_dict(state["ages"])
    if autopilot is not None:
        autopilot.load(state["plan"])
    policy.load_state_dict(state.get("sync"))


def _check_header(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    if state.get("version") not in READS:
        raise CheckpointError(
            f"the checkpoint's version is {state.get('version')!r}, expected one of {READS}; load what wire.state_dict() "
            "has given, unchanged"
        )
    for key, value in expected.items():
        if state.get(key) != value:
            raise CheckpointError(
                f"the checkpoint's {key} is {state.get(key)!r}, expected {value!r}; load the state that this rank "
                "saved under the same settings, or start without one (residuals then begin at zero)"
            )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {missing}; load what wire.state_dict() has given, unchanged")
