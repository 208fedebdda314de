"""Where training runs: how many ranks, and how many of them share the cores of one machine."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from thinwire.core import ConfigError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Hosts of a lab and containers have names of their own but share one kernel, and its cores."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks and cores.

    With R ranks of T threads on C cores, a rank that only trains is max(1, R·T/C) times slower than alone, and one whose
    communication thread works too max(1, R·(T+1)/C) times. One second of communication work therefore delays backward by
    the difference: nothing where cores are spare, two seconds with four single-threaded ranks on two cores (docs/log.md).

    Args:
        world_size: ranks in all.
        ranks_per_machine: ranks that share one machine's cores.
        cores: of one machine.
        threads: that one rank computes with.
    """

    world_size: int
    ranks_per_machine: int = 1
    cores: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; expected at least 1")
        if self.ranks_per_machine > self.world_size:
            raise ConfigError(
                f"got {self.ranks_per_machine} ranks per machine and {self.world_size} in all; "
                "expected at most all of them on one machine"
            )

    @property
    def slowdown(self) -> float:
        """How many times slower than alone a rank computes because others share its cores."""
        return max(1.0, self.ranks_per_machine * self.threads / self.cores)

    @property
    def busy_slowdown(self) -> float:
        """The same while the communication threads work too."""
        return max(1.0, self.ranks_per_machine * (self.threads + 1) / self.cores)
