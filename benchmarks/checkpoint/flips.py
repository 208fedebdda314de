"""Bit flips and other damage to real checkpoints: detected, or loaded as if nothing had happened? Beside torch's formats."""

from __future__ import annotations

import io
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.checkpoint import scan
from thinwire.checkpoint.files import LocalFiles

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))


@dataclass(frozen=True)
class Damage:
    """Tries, and what became of them: detected, harmless (the right values were loaded), silently wrong."""

    name: str
    tried: int
    detected: int
    harmless: int
    silently_wrong: int


def thinwire_damage(tries: int, seed: int) -> list[Damage]:
    """All kinds of damage to a directory with three checkpoints and a log."""
    import shutil

    from checkpoint.damage import KINDS
    from checkpoint.workloads import Run, check_recovery

    found = []
    with tempfile.TemporaryDirectory(prefix="thinwire-flips-") as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        run = Run(LocalFiles(whole), "a" * 16, keep=3)
        for _ in range(3):
            run.advance()
            run.save()
            run.begin_log()
            run.advance()
            run.advance()
        pristine = _states(LocalFiles(whole))
        for kind, spoil in KINDS.items():
            detected = harmless = wrong = 0
            for index in range(tries):
                root = Path(scratch) / "spoilt"
                shutil.copytree(whole, root)
                spoil(root, random.Random(seed + index))
                try:
                    check_recovery(LocalFiles(root), Run(LocalFiles(root), "b" * 16))
                except AssertionError:
                    wrong += 1
                else:
                    noticed = _states(LocalFiles(root)) != pristine or _complains(LocalFiles(root))
                    detected, harmless = detected + noticed, harmless + (not noticed)
                shutil.rmtree(root)
            found.append(Damage(f"thinwire, {kind}", tries, detected, harmless, wrong))
    return found


def torch_save_flips(tries: int, seed: int) -> Damage:
    """Single bits of a file of ``torch.save``, read with ``weights_only``."""
    tensor = torch.randn(50_000)
    buffer = io.BytesIO()
    torch.save({"w": tensor}, buffer)

    def load(data: bytes) -> torch.Tensor:
        loaded: torch.Tensor = torch.load(io.BytesIO(data), weights_only=True)["w"]
        return loaded

    return _flips("torch.save, flip", buffer.getvalue(), load, tensor, tries, seed)


def safetensors_flips(tries: int, seed: int) -> Damage | None:
    """Single bits of a plain safetensors file; None where the package is not installed."""
    try:
        from safetensors.torch import load, save
    except ImportError:
        return None
    tensor = torch.randn(50_000)
    return _flips("safetensors, flip", save({"w": tensor}), lambda data: load(data)["w"], tensor, tries, seed)


def _flips(
    name: str, data: bytes, load: Callable[[bytes], torch.Tensor], expected: torch.Tensor, tries: int, seed: int
) -> Damage:
    rng, detected, harmless, wrong = random.Random(seed), 0, 0, 0
    for _ in range(tries):
        spoilt = bytearray(data)
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
        try:
            same = torch.equal(load(bytes(spoilt)), expected)
        except Exception:
            detected += 1
        else:
            harmless, wrong = harmless + same, wrong + (not same)
    return Damage(name, tries, detected, harmless, wrong)


def _states(files: LocalFiles) -> list[tuple[str, str, object]]:
    return [(one.name, one.damage, one.log and one.log.good_bytes) for one in scan.survey(files)]


def _complains(files: LocalFiles) -> bool:
    return any(one.damage for one in scan.survey(files))
