"""Probes kept between runs: one file per cluster."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from thinwire.core import ConfigError
from thinwire.core.schema import to_json
from thinwire.plan.cluster import Cluster
from thinwire.plan.probe import Probe


def probe_path(folder: Path, cluster: Cluster, facts: Mapping[str, str]) -> Path:
    """Where the probe of this cluster is kept; the name changes with everything that changes the curves."""
    text = json.dumps([to_json(cluster), dict(sorted(facts.items()))])
    return folder / f"probe-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}.json"


def keep(probe: Probe, folder: Path) -> Path:
    """Save a probe in its place; an older one of the same cluster is replaced."""
    path = probe_path(folder, probe.cluster, probe.facts)
    probe.save(path)
    return path


def latest(folder: Path, world_size: int | None = None) -> Probe | None:
    """The newest probe that can be read, of ``world_size`` ranks if that is given."""
    found: list[Probe] = []
    for path in folder.glob("probe-*.json"):
        try:
            found.append(Probe.load(path))
        except ConfigError:  # of an older version: as good as none
            continue
    fitting = [one for one in found if world_size in (None, one.cluster.world_size)]
    return max(fitting, key=lambda one: one.date, default=None)
