"""What one contestant of the demo is told to do; written as JSON for its workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from thinwire.core.schema import from_json, load_json, save_json, to_json

Mode = Literal["floor", "ddp", "ddp_fp16", "ddp_powersgd", "thinwire"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained; the same for every contestant.

    The defaults fit two cores: four ranks of one thread take about 0.9 s for a step with no communication, stock DDP at
    200 Mbit/s takes more than twice as long, and all three runs end within four minutes.
    """

    model: str = "small"
    steps: int = 45
    batch: int = 7  # windows per rank and step
    seq: int = 128  # bytes per window
    seed: int = 0
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    evaluations: int = 5  # during the run, at equal distances; the last is at the end
    evaluation_windows: int = 64  # over all ranks

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be run."""
        for name in ("steps", "batch", "seq", "evaluations", "evaluation_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows this step (counted from 0)."""
        done = step + 1
        return done * self.evaluations // self.steps > step * self.evaluations // self.steps


# Up to 18 steps are measured before "auto" plans; a small batch keeps this at a minute, a third of which is start-up.
QUICK = {"steps": 24, "batch": 2, "evaluations": 1}


def make_workload(
    *, quick: bool, model: str, seed: int, steps: int | None = None, batch: int | None = None, seq: int | None = None
) -> Workload:
    """The workload a user asked for: defaults (those of ``--quick`` if asked), and what was given explicitly."""
    given = {name: value for name, value in (("steps", steps), ("batch", batch), ("seq", seq)) if value is not None}
    return Workload(model=model, seed=seed, **{**(QUICK if quick else {}), **given})


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One run of the demo."""

    name: str  # short, also the name of its directory
    label: str  # as the table and the report show it
    mode: Mode
    workload: Workload
    compress: str = "auto"  # only for mode "thinwire"
    fuse: str = "auto"  # likewise
    powersgd_rank: int = 4  # only for mode "ddp_powersgd"
    network: str = ""  # as the report shows it
    bits_per_s: int | None = None  # of each host's link; None: unshaped
    emulated: bool = False  # thinwire's transport is throttled in place of a shaped network

    def __post_init__(self) -> None:
        """Refuse an unknown mode."""
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode is {self.mode!r}, expected one of {', '.join(get_args(Mode))}")

    def save(self, path: Path) -> None:
        """Write the settings as JSON."""
        save_json(path, to_json(self))

    @classmethod
    def load(cls, path: Path) -> Contestant:
        """Read what :meth:`save` wrote."""
        remedy = "run thinwire demo again"
        return from_json(cls, load_json(path, what="settings", remedy=remedy), what="settings", remedy=remedy)
