"""The state of an attached wire: what a checkpoint keeps of it, and what is refused when one is loaded.

Holds only tensors, numbers, strings and None. A state that is refused has changed nothing: everything is validated before
anything is applied.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.autopilot.active_plan import ActivePlan, read_active_plan
from thinwire.autopilot.controller import Autopilot
from thinwire.core import CheckpointError, Compressor, ConfigError
from thinwire.core.schema import from_json
from thinwire.engine.ages import aged_elems, check_ages
from thinwire.engine.base import Gradients
from thinwire.exchange import states
from thinwire.fusion import parse_fusion
from thinwire.fusion.prepare import prepare
from thinwire.plan.price import DENSE
from thinwire.sync.policy import Bound

VERSION = 5  # 2: ages; 3: plan, carried; 4: roles; 5: sync
READS = (3, 4, 5)
_REMEDY = "load what wire.state_dict() has given on this rank, unchanged"
_OF_CHANNEL = ("seed", "fusion", "tensors", "carried", "ages")  # what the channel and the ages check
_SYNC = "sync"  # what the policy checks


@dataclass(frozen=True)
class _Head:
    """Everything else."""

    version: int
    rank: int
    world_size: int
    compress: str
    step: int
    plan: str | None
    roles: Mapping[str, Mapping[str, str]] | None = None

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ConfigError(f"step is {self.step}, expected at least 0")


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
        _SYNC: policy.state_dict(),
    }


def load(
    state: Mapping[str, Any], gradients: Gradients, autopilot: Autopilot | None, policy: Bound, chosen: str
) -> None:
    """Go on exactly where ``state`` was taken.

    Raises:
        CheckpointError: it was taken of another model, compressor, rank or world size. Nothing is changed then.
    """
    channel, link = gradients.channel, gradients.channel.members.link()
    head = _read_head(state, {"rank": link.rank, "world_size": link.world_size, "compress": chosen})
    active = None if head.plan is None else read_active_plan(head.plan)
    compressor = (
        channel.compressor if chosen != "auto" else _prepared(DENSE if active is None else active.plan.compress)
    )
    if active is not None:
        _check_plan(active, channel.tensors)
    roles = states.roles(channel.tensors.values(), compressor)
    if head.version >= 4 and head.roles != roles:
        raise CheckpointError(f"the checkpoint's roles are {reprlib.repr(head.roles)}, expected {roles}; {_REMEDY}")
    values = {**state, "index": head.step, "groups": state["fusion"]}
    channel.check_state(values, compressor)
    check_ages(state["ages"], aged_elems(channel.tensors.values(), compressor))
    policy.check_state(state.get(_SYNC))
    # Nothing below is refused any more.
    channel.load_state_dict(values, compressor)
    gradients.renew_ages()
    gradients.ages.load_state_dict(state["ages"])
    if autopilot is not None:
        autopilot.load(active)
    policy.load_state_dict(state.get(_SYNC))


def _read_head(state: Any, expected: Mapping[str, Any]) -> _Head:
    others = (
        {key: value for key, value in state.items() if key not in (*_OF_CHANNEL, _SYNC)}
        if isinstance(state, Mapping)
        else state
    )
    head = from_json(_Head, others, what="checkpoint", remedy=_REMEDY, error=CheckpointError)
    if head.version not in READS:
        raise CheckpointError(f"the checkpoint's version is {head.version}, expected one of {READS}; {_REMEDY}")
    for key, value in expected.items():
        if getattr(head, key) != value:
            raise CheckpointError(
                f"the checkpoint's {key} is {getattr(head, key)!r}, expected {value!r}; load the state that this rank "
                "saved under the same settings, or start without one (residuals then begin at zero)"
            )
    needed = (*_OF_CHANNEL, _SYNC) if head.version >= 5 else _OF_CHANNEL
    missing = [key for key in needed if key not in state]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {missing}; {_REMEDY}")
    return head


def _check_plan(active: ActivePlan, names: Collection[str]) -> None:
    _prepared(active.plan.compress)
    try:
        parse_fusion(active.plan.fuse)
    except ConfigError as error:
        raise CheckpointError(f"the checkpoint's plan has another fusion: {error}; {_REMEDY}") from error
    orders = (
        [active.order] if active.groups is None else [active.order, [n for one in active.groups for n in one.names]]
    )
    if any(sorted(one) != sorted(names) for one in orders):
        raise CheckpointError(
            f"order and groups of the checkpoint's plan name other parameters than this model; {_REMEDY}"
        )


def _prepared(compress: str) -> Compressor:
    try:
        return prepare(compress)
    except ConfigError as error:
        raise CheckpointError(f"the checkpoint's plan has another compressor: {error}; {_REMEDY}") from error
