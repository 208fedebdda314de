"""Run the demo's contestants on a lab, interleaved, and let a watcher follow."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from thinwire.demo.fairness import KEEP_FREED_MEMORY
from thinwire.demo.settings import Contestant, Workload
from thinwire.lab import BaseLab, EmulatedLab, Lab, LabResult, parse_rate
from thinwire.observe.events import Event, EventWriter, parse_event

LAST_LINES = 15


class WorkerFailed(RuntimeError):
    """A worker ended with an error; the message ends with what it said last."""


class Watcher(Protocol):
    """Somebody who follows the contest; called from the threads that read the workers' output."""

    def started(self, contestant: Contestant) -> None:
        """The contestant's workers are being started; all contestants share them."""

    def event(self, contestant: Contestant, event: Event) -> None:
        """Rank 0 wrote an event."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network that the contestants run on."""

    hosts: int = 4
    rate: str = "200mbit"
    emulated: bool = False

    def describe(self) -> str:
        """The network as text for people."""
        return f"{self.hosts} hosts at {self.rate}" + (" (emulated)" if self.emulated else "")

    def build(self) -> BaseLab:
        """Build the lab: network namespaces, or throttled processes on loopback."""
        return EmulatedLab(self.hosts, self.rate) if self.emulated else Lab(self.hosts, self.rate)


def line_up(workload: Workload, network: Network, compress: Sequence[str]) -> list[Contestant]:
    """The contestants in order: the floor, dense, and thinwire once for each entry of ``compress``."""

    def contestant(name: str, label: str, mode: str, spec: str = "auto") -> Contestant:
        return Contestant(
            name=name,
            label=label,
            mode=mode,  # type: ignore[arg-type]
            workload=workload,
            compress=spec,
            network=network.describe(),
            bits_per_s=parse_rate(network.rate),
            emulated=network.emulated,
        )

    floor = contestant("1-floor", "floor (no communication)", "floor")
    dense = (
        # Stock DDP cannot be slowed down without a shaped network; thinwire's own dense exchange can.
        contestant("2-dense", "thinwire dense (emulated)", "thinwire", "dense")
        if network.emulated
        else contestant("2-ddp", "dense DDP", "ddp")
    )
    ours = [
        contestant(f"{3 + index}-thinwire", f"thinwire {spec}", "thinwire", spec) for index, spec in enumerate(compress)
    ]
    return [floor, dense, *ours]


def run_contest(contestants: Sequence[Contestant], network: Network, directory: Path, watcher: Watcher) -> None:
    """Run all contestants in one job, interleaved; their settings and events go to ``directory/<name>/``.

    Raises:
        WorkerFailed: a worker ended with an error; what was measured until then is kept.
    """
    settings = [(directory / contestant.name / "settings.json").resolve() for contestant in contestants]
    for contestant, path in zip(contestants, settings, strict=True):
        contestant.save(path)
    with network.build() as lab:
        for contestant in contestants:
            watcher.started(contestant)
        announcer = _Announcer(contestants, watcher, lab.hosts)
        command = [sys.executable, "-m", "thinwire.demo.train", *map(str, settings)]
        result = lab.run(command, env=KEEP_FREED_MEMORY, on_line=announcer)
    _write_lab_event(result, directory)
    if not result.ok:
        raise WorkerFailed(announcer.failure(result))


def _write_lab_event(result: LabResult, directory: Path) -> None:
    with EventWriter(directory / "lab.jsonl") as events:
        events.write(
            "lab",
            duration_s=result.duration_s,
            exit_codes=result.exit_codes,
            sent_bytes=result.sent_bytes,
            received_bytes=result.received_bytes,
        )


class _Announcer:
    """Reads what the workers say: rank 0's events are for the watcher, the last other words for a complaint."""

    def __init__(self, contestants: Sequence[Contestant], watcher: Watcher, hosts: int) -> None:
        self._contestants = {contestant.name: contestant for contestant in contestants}
        self._watcher = watcher
        self._turn: Contestant | None = None
        self._said: dict[int, deque[str]] = {host: deque(maxlen=LAST_LINES) for host in range(hosts)}

    def __call__(self, host: int, line: str) -> None:
        event = parse_event(line) if host == 0 else None
        if event is None:
            self._said[host].append(line)
        elif event["kind"] == "turn":
            self._turn = self._contestants[event["contestant"]]
        elif self._turn is not None:
            self._watcher.event(self._turn, event)

    def failure(self, result: LabResult) -> str:
        """For people: who, and what was said last."""
        host = result.first_failure if result.first_failure is not None else 0
        last_words = "\n".join(self._said[host]) or "(nothing)"
        whose = "at the start" if self._turn is None else f"in the turn of {self._turn.label}"
        return f"host {host} ended {whose} with exit code {result.exit_codes[host]}; it last said:\n{last_words}"
