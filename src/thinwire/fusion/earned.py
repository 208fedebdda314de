"""Fewer messages where they cost: neighbours are merged as long as the simulated step gets shorter.

The planners think of one wire and one encoder. Where communication shares its cores with backward, every message also takes
processor time from it, and a plan of many small messages that hide perfectly behind backward makes backward longer.
"""

from __future__ import annotations

from thinwire.fusion.groups import Groups
from thinwire.fusion.profile import Profile
from thinwire.fusion.timeline import simulate_step


def merge_costly(profile: Profile, groups: Groups) -> Groups:
    """Merge the pair of neighbours that shortens the step most, until none does; nothing where messages cost nothing."""
    groups = list(groups)
    finish_s = simulate_step(profile, groups).finish_s
    while profile.message_cost_s > 0 and len(groups) > 1:
        merged = [[*groups[:i], groups[i] + groups[i + 1], *groups[i + 2 :]] for i in range(len(groups) - 1)]
        best_s, best = min(((simulate_step(profile, one).finish_s, i) for i, one in enumerate(merged)))
        if best_s >= finish_s:
            break
        groups, finish_s = merged[best], best_s
    return groups
