"""Bit flips, truncations, swapped, stale, duplicated and missing files: never loaded, always named."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.damage import KINDS
from checkpoint.loops import Job
from checkpoint.workloads import Run, check_recovery
from thinwire.checkpoint import Checkpointer, scan
from thinwire.checkpoint.files import LocalFiles
from thinwire.checkpoint.manifest import Manifest
from thinwire.checkpoint.sealed import Damaged, seal, unseal
from thinwire.checkpoint.tensors import read_header

TRIES = 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    run = Run(LocalFiles(root), "a" * 16, keep=3)
    for _ in range(3):
        run.advance()
        run.save()
        run.begin_log()
        run.advance()
        run.advance()
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_and_never_loaded(kind: str, whole: Path, tmp_path: Path) -> None:
    for seed in range(TRIES):
        root = tmp_path / str(seed)
        shutil.copytree(whole, root)
        KINDS[kind](root, random.Random(seed))
        files = LocalFiles(root)
        # Whatever is still taken for good is byte for byte what was written: this raises otherwise.
        check_recovery(files, Run(files, "b" * 16))
        findings = scan.survey(files)
        changed = _differs(whole, root)
        damaged = [one for one in findings if one.damage or (one.log is not None and one.log.torn_bytes)]
        if changed and kind in ("flip", "truncate") and "log" not in changed:
            assert damaged, f"seed {seed}: {changed} has changed and nobody noticed"
        shutil.rmtree(root)


def test_recovery_takes_the_newest_that_is_whole(tmp_path: Path) -> None:
    job = Job()
    states = {}
    with Checkpointer(tmp_path, job.model, job.optimizer, extra=job.extra, every=2, keep=3) as checkpoints:
        for step in range(1, 7):
            job.step()
            checkpoints.maybe_save(step)
            checkpoints.wait()
            states[step] = job.everything()
    newest = tmp_path / "step-00000006" / "rank-00000.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 4
    newest.write_bytes(data)
    again = Job(seed=4)
    with Checkpointer(tmp_path, again.model, again.optimizer, extra=again.extra) as checkpoints:
        assert checkpoints.restore() == 4
        assert again.everything() == states[4]


@given(st.binary(max_size=300))
def test_parsers_refuse_noise(noise: bytes) -> None:
    for parse in (Manifest.from_bytes, lambda d: unseal(d, "x"), lambda d: read_header(d, len(d), "x")):
        with pytest.raises(Damaged):
            parse(noise)  # type: ignore[operator]


@given(st.data())
def test_headers_that_lie_are_refused_before_anything_is_made(data: st.DataObject) -> None:
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "I64", "U8", "F13"]),
            "shape": st.lists(st.integers(-1, 1 << 40), max_size=4),
            "data_offsets": st.lists(st.integers(-1, 1 << 50), min_size=1, max_size=3),
        }
    )
    fields = data.draw(st.dictionaries(st.text(max_size=5), entry, min_size=1, max_size=3))
    import json

    text = json.dumps(fields).encode()
    raw = len(text).to_bytes(8, "little") + text + bytes(16)
    try:
        entries, _ = read_header(raw, len(raw), "x")
    except Damaged:
        return
    assert sum(one.size for one in entries.values()) == 16


def test_any_spelling_but_our_own_is_damage() -> None:
    sealed = seal({"a": 1})
    assert unseal(sealed, "x") == {"a": 1}
    with pytest.raises(Damaged):
        unseal(sealed.replace(b":", b": ", 1), "x")


def test_old_states_are_not_pickles(tmp_path: Path) -> None:
    job = Job()
    with Checkpointer(tmp_path, job.model, job.optimizer, extra=job.extra, log=True) as checkpoints:
        job.step()
        checkpoints.maybe_save(1)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not data.startswith(b"\x80"), f"{path} looks like a pickle"
            assert not data.startswith(b"PK"), f"{path} looks like torch.save"
    assert torch is not None


def _differs(one: Path, other: Path) -> list[str]:
    names = {path.relative_to(root) for root in (one, other) for path in root.rglob("*") if path.is_file()}
    return [
        str(name)
        for name in sorted(names)
        if not (one / name).exists()
        or not (other / name).exists()
        or (one / name).read_bytes() != (other / name).read_bytes()
    ]
