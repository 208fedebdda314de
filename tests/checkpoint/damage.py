"""Ways in which files go bad, on a directory of the operating system."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path


def flip(root: Path, rng: random.Random) -> None:
    """One bit of one file."""
    path = rng.choice(_files(root))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(root: Path, rng: random.Random) -> None:
    """The end of one file is gone."""
    path = rng.choice(_files(root))
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def swap(root: Path, rng: random.Random) -> None:
    """Two files have changed places."""
    first, second = rng.sample(_files(root), 2)
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])


def stale(root: Path, rng: random.Random) -> None:
    """A file of an older checkpoint stands in a newer one."""
    steps = sorted(root.glob("step-*"))
    older, newer = rng.sample(range(len(steps)), 2)
    name = rng.choice(sorted(path.name for path in steps[older].iterdir()))
    (steps[newer] / name).write_bytes((steps[older] / name).read_bytes())


def duplicate(root: Path, rng: random.Random) -> None:
    """A checkpoint, or a log file, was copied under another name."""
    logs = sorted(root.glob("log-*"))
    if logs and rng.random() < 0.5:
        one = rng.choice(logs)
        shutil.copy(one, one.with_name(f"log-{rng.randrange(99):08d}-{'9' * 16}-rank-00000.bin"))
    else:
        shutil.copytree(rng.choice(sorted(root.glob("step-*"))), root / f"step-{rng.randrange(50, 99):08d}")


def missing(root: Path, rng: random.Random) -> None:
    """A file is gone."""
    rng.choice(_files(root)).unlink()


KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "flip": flip, "truncate": truncate, "swap": swap, "stale": stale, "duplicate": duplicate, "missing": missing,
}  # fmt: skip


def _files(root: Path) -> list[Path]:
    found = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(("lock-", "progress-"))]
    return sorted(path for path in found if path.stat().st_size)
