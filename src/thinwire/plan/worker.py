"""The probe's worker: ``python -m thinwire.plan.worker SETTINGS.json``, once per rank, rendezvous from the environment.

Rank 0 writes the probe to the path that the settings name, and one line of progress per measurement to standard output.
"""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thinwire.compressors
import thinwire.wrappers  # noqa: F401  (both imports register what they hold)
from thinwire.comm import GLOO_LANES, Throttled, TorchDistTransport, Transport
from thinwire.core.schema import from_json, load_json, save_json, to_json
from thinwire.plan.cluster import Cluster, machine_id
from thinwire.plan.probe import LAST_BYTES, Probe, Progress, measure_codecs, measure_network
from thinwire.plan.result import now
from thinwire.plan.roofs import measure_roofs

_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    Args:
        throttle_bits_per_s: emulate a link of this rate; None measures what is there.
        facts: what identifies the cluster besides its hosts.
    """

    out: str
    specs: Sequence[str]
    largest_bytes: int = LAST_BYTES
    cores: int = 1
    throttle_bits_per_s: float | None = None
    facts: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        save_json(path, to_json(self))

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read what ``save`` wrote."""
        remedy = "run thinwire probe again"
        return from_json(cls, load_json(path, what="settings", remedy=remedy), what="settings", remedy=remedy)


def run(settings: Settings, progress: Progress) -> Probe | None:
    """Join the process group that the environment describes, measure, and leave. Rank 0 gets the probe."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        return probe_group(settings, progress)
    finally:
        dist.destroy_process_group()


def probe_group(settings: Settings, progress: Progress) -> Probe | None:
    """Measure on the process group that exists. All ranks call it; rank 0 saves the probe and returns it."""
    machines = _gather((machine_id(), socket.gethostname()))
    network = measure_network(_transport(settings), largest_bytes=settings.largest_bytes, progress=progress)
    probe = None
    if dist.get_rank() == 0:  # alone: the others wait, so that nobody disturbs the clock
        probe = Probe(
            cluster=Cluster(
                world_size=dist.get_world_size(),
                ranks_per_machine=max(Counter(machine for machine, _ in machines).values()),
                cores=settings.cores,
                threads=torch.get_num_threads(),
            ),
            network=network,
            codecs=measure_codecs(settings.specs, progress),
            roofs=measure_roofs(),
            facts={"hosts": ",".join(sorted({host for _, host in machines})), "backend": "gloo", **settings.facts},
            date=now(),
        )
        probe.save(Path(settings.out))
    dist.barrier()
    return probe


def _transport(settings: Settings) -> Transport:
    """With as many lanes as in training, where an emulated network has one."""
    if settings.throttle_bits_per_s is not None:
        return Throttled(TorchDistTransport(), settings.throttle_bits_per_s)
    return TorchDistTransport(later=[dist.new_group() for _ in range(GLOO_LANES - 1)])


def _gather(mine: tuple[str, str]) -> list[tuple[str, str]]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def main(path: Path) -> None:
    """Run as the settings say; progress goes to standard output, to the process that started the worker."""

    def tell(done: str) -> None:
        if dist.get_rank() == 0:
            sys.stdout.write(f"probed {done}\n")
            sys.stdout.flush()

    run(Settings.load(path), tell)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
