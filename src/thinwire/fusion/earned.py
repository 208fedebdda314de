"""Fewer messages where they cost: neighbours are merged as long as the simulated step gets shorter.

The planners think of one wire and one encoder. Where communication shares its cores with backward, every message also takes
processor time from it, and a plan of many small messages that hide perfectly behind backward makes backward longer.
"""

from __future__ import annotations

from collections.abc import Callable

from thinwire.fusion.groups import Groups


def merge_costly(groups: Groups, finish_s: Callable[[Groups], float]) -> Groups:
    """Merge neighbours, from the first to the last and again, until no merge shortens the step.

    Args:
        finish_s: when the step with these groups ends.
    """
    groups, best_s, shortened = list(groups), finish_s(groups), True
    while shortened:
        shortened, index = False, 0
        while index + 1 < len(groups):
            merged = [*groups[:index], groups[index] + groups[index + 1], *groups[index + 2 :]]
            merged_s = finish_s(merged)
            if merged_s < best_s:
                groups, best_s, shortened = merged, merged_s, True
            else:
                index += 1
    return groups
