"""Cleans a directory up: nothing that is whole is touched, nothing that is damaged is destroyed. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from thinwire.checkpoint import commit, scan
from thinwire.checkpoint.client import wait_for_writers
from thinwire.checkpoint.files import LocalFiles

DAMAGED = "damaged"


@dataclass(frozen=True)
class Action:
    """What is done with one name: ``move``, ``cut`` or ``remove``."""

    name: str
    action: str
    why: str
    size: int = 0  # what is left after a cut


def plan_repair(files: LocalFiles) -> list[Action]:
    """What ``repair`` would do."""
    actions = []
    for found in scan.survey(files):
        if found.kind == "temporary":
            actions.append(Action(found.name, "remove", "was never finished"))
        elif found.log is not None and not found.damage and found.log.torn_bytes:
            why = f"its last {found.log.torn_bytes} bytes are no whole record"
            actions.append(Action(found.name, "cut", why, found.log.good_bytes))
        elif found.damage:
            actions.append(Action(found.name, "move", found.damage))
    return actions


def repair(files: LocalFiles) -> list[Action]:
    """Do it.

    Raises:
        TimeoutError: a run is writing to the directory.
    """
    wait_for_writers(files.root, timeout_s=1.0)
    actions = plan_repair(files)
    for one in actions:
        if one.action == "move":
            files.make_directory(DAMAGED)
            number = len(files.names(DAMAGED))
            files.rename(one.name, f"{DAMAGED}/{number:04d}-{one.name}")
        elif one.action == "cut":
            os.truncate(files.root / one.name, one.size)
    commit.sweep(files)
    files.sync_directory()
    return actions
