"""The demo's text: the source of Python's standard library, which every machine that can run the demo already has."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Directories whose files are generated, third-party or nearly all tables: not what a reader would call source text.
SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests", "lib2to3", "idlelib", "encodings"})
EVALUATION_EVERY_FILES = 20
MIN_CORPUS_BYTES = 1_000_000


def standard_library() -> Path:
    """Return the directory that holds the standard library's source."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path) -> list[Path]:
    """List the ``.py`` files under ``root`` in an order that does not depend on the file system."""
    found: list[Path] = []
    for directory, children, names in os.walk(root):
        children[:] = [child for child in children if child not in SKIPPED_DIRECTORIES]  # prunes the walk
        found += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to evaluate on; no file is in both."""

    train: Tensor  # [bytes], uint8
    evaluation: Tensor  # [bytes], uint8


def load_corpus(root: Path | None = None, min_bytes: int = MIN_CORPUS_BYTES) -> Corpus:
    """Read all source files under ``root`` (the standard library unless given), every 20th of them for evaluation."""
    root = standard_library() if root is None else root
    train, evaluation = bytearray(), bytearray()
    for index, path in enumerate(source_files(root)):
        (evaluation if index % EVALUATION_EVERY_FILES == 0 else train).extend(path.read_bytes())
    if len(train) < min_bytes or not evaluation:
        raise ValueError(
            f"found {len(train):,} bytes of Python source under {root}, expected at least {min_bytes:,}: "
            "run the demo with a Python whose standard library is installed as .py files"
        )
    return Corpus(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(evaluation, dtype=torch.uint8))


def windows_at(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut inputs and next-byte targets, each ``[len(starts), length]``, out of ``text``."""
    positions = starts[:, None] + torch.arange(length + 1)
    cut = text[positions].long()
    return cut[:, :-1], cut[:, 1:]


def batch_starts(text_bytes: int, length: int, step: int, rank: int, world_size: int, batch: int, seed: int) -> Tensor:
    """Where this rank's windows of this step start.

    The text is cut into windows that do not overlap, shuffled again each epoch; the ranks take turns, so that within an
    epoch no window is seen twice by anybody and every contestant sees the same windows in the same order.
    """
    windows = (text_bytes - 1) // length
    per_step = batch * world_size
    steps_per_epoch = windows // per_step
    if steps_per_epoch == 0:
        raise ValueError(f"{text_bytes:,} bytes give {windows} windows of {length}, fewer than one step's {per_step}")
    epoch, step_in_epoch = divmod(step, steps_per_epoch)
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    first = step_in_epoch * per_step + rank * batch
    return order[first : first + batch] * length


def evaluation_starts(text_bytes: int, length: int, count: int, rank: int, world_size: int) -> Tensor:
    """This rank's share of ``count`` windows spread evenly over the evaluation text."""
    starts = torch.linspace(0, text_bytes - length - 1, count, dtype=torch.float64).long()
    return starts[rank::world_size]
