"""Case: never ends. For the test of the launcher itself."""

from __future__ import annotations

import time

from gloo.support import Case, Rank


def hangs(rank: Rank) -> None:
    time.sleep(600)


CASES: dict[str, Case] = {"hangs": hangs}
