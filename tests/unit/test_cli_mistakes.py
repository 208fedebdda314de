"""What users get wrong on the command line: one line that says what to do, exit status 2, nothing written, no long work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import thinwire.api  # noqa: F401  (fills the registry)
from thinwire.cli import bench
from thinwire.cli.commands import app
from thinwire.observe.events import EventWriter
from thinwire.plan import profile_model

LINK = ("--link", "10mbit,1ms")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one good file of each kind, and several that are not; whatever takes long is forbidden."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)

    def too_late(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a mistake was not found before the long work")

    for slow in ("thinwire.plan.measure_codec", "thinwire.plan.profile_model", "thinwire.demo.contest.run_contest"):
        monkeypatch.setattr(slow, too_late)
    monkeypatch.setattr("thinwire.cli.probe._run_workers", too_late)
    monkeypatch.setattr("thinwire.lab.base.BaseLab.start", too_late)
    profile_model(nn.Linear(32, 32), torch.randn(4, 32), steps=1).save(tmp_path / "profile.json")
    with EventWriter(tmp_path / "run" / "rank0.jsonl") as events:
        events.write("run", label="x", mode="thinwire", rank=0, world_size=1)
        events.write("step", step=3, step_s=0.1, elapsed_s=0.3)
    (tmp_path / "garbage").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "garbage.py").write_bytes(b"\x00\xff(")
    (tmp_path / "nested.json").write_text("[" * 100_000)
    (tmp_path / "number.json").write_text("3")
    (tmp_path / "broken.jsonl").write_text(
        '{"v": 1, "kind": "run", "label": "x", "mode": 3, "rank": 0, "world_size": 1}\n'
    )
    (tmp_path / "folder").mkdir()
    return tmp_path


def mistaken(*words: str) -> str:
    """The line that is said."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.output
    return lines[0]


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(one): one.read_bytes() if one.is_file() else None for one in folder.rglob("*")}


PLAN = ("plan", "--profile", "profile.json", *LINK)
UNWRITABLE = ["folder", "", "garbage/x", "/proc/nowhere/x", "/dev/null/x", "x" * 300, "new/" + "x" * 300]
NO_JSON = ["nobody", "folder", "garbage", "nested.json", "number.json"]
TABLE: list[tuple[tuple[str, ...], str]] = [
    *(((*PLAN, option, path), option) for option in ("--json", "--html", "--save-profile") for path in UNWRITABLE),
    *((("report", "run", "--out", path), "--out") for path in UNWRITABLE),
    *((("probe", "--out", path), "--out") for path in UNWRITABLE),
    *((("report", "run", "--tensorboard", path), "--tensorboard") for path in UNWRITABLE[2:]),
    *((("demo", "--emulate", "--out", path), "--out") for path in UNWRITABLE[2:]),
    (("demo", "--emulate", "--out", "garbage"), "--out"),
    (("demo", "--emulate", "--out", "run"), "not empty"),
    (("report", "run", "--tensorboard", "garbage"), "--tensorboard"),
    (("report", "run/rank0.jsonl", "--out", "run/rank0.jsonl"), "an input too"),
    ((*PLAN, "--json", "same", "--html", "same"), "--json too"),
    ((*PLAN, "--json", "profile.json"), "an input too"),
    *(((*PLAN, "--memory", value), "--memory") for value in ("inf", "-1", "nan", "-inf", "lots")),
    *(((*PLAN, "--cores", value), "--cores") for value in ("0", "-1", "1.5", "nan", str(10**30))),
    *(((*PLAN, "--hosts", value), "--hosts") for value in ("0", "1", "-1", str(10**30))),
    *(((*PLAN, "--ranks-per-machine", value), "--ranks-per-machine") for value in ("0", "-3")),
    ((*PLAN, "--ranks-per-machine", "9", "--hosts", "2"), "ranks per machine"),
    *((("plan", "--profile", "profile.json", "--link", value), "link") for value in ("0mbit", "-1mbit", "nan", "")),
    ((*PLAN, "--quality", "best"), "exact, safe, fast"),
    ((*PLAN, "--backend", "mpi"), "gloo or nccl"),
    ((*PLAN, "--compress", "zip"), "unknown compressor"),
    ((*PLAN, "--compress", "ef | " * 5000 + "int4"), "compressor"),
    (PLAN[:3], "thinwire probe first"),
    *((("plan", "--profile", file, *LINK), "profile") for file in NO_JSON),
    *((("plan", "--profile", "profile.json", "--probe", file), "probe") for file in NO_JSON),
    *((("plan", f"{target}:make", *LINK), target) for target in ("nobody.py", "garbage.py", "folder.py", "no_module")),
    (("plan", "garbage", *LINK), "names no function"),
    *((("probe", "--hosts", value), "--hosts") for value in ("0", "1", "-1", "201", "many")),
    *((("probe", "--largest", value), "--largest") for value in ("0", "-5", str(10**12))),
    *((("probe", "--rate", value), "rate") for value in ("0mbit", "fast", "-1mbit", "nan", "9" * 50 + "gbit")),
    *((("probe", "--emulate", "--rate", value), "rate") for value in ("0mbit", "fast")),
    (("probe", "--compress", "zip"), "unknown compressor"),
    *((("demo", "--emulate", "--hosts", value), "--hosts") for value in ("0", "1", "201")),
    *((("demo", "--emulate", option, value), option) for option in ("--steps", "--batch", "--seq") for value in ("0", "-1")),
    *((("demo", "--emulate", "--rate", value), "rate") for value in ("0mbit", "fast", "")),
    (("demo", "--emulate", "--seed", str(2**64)), "--seed"),
    (("demo", "--emulate", "--model", "huge"), "huge"),
    (("demo", "--emulate", "--compress", "zip"), "unknown compressor"),
    *((("lab", "run", "--emulate", "--hosts", value, "true"), "--hosts") for value in ("0", "-1", "201")),
    *((("lab", "run", "--emulate", "--timeout", value, "true"), "--timeout") for value in ("0", "-1", "nan", "inf")),
    *((("lab", "run", "--emulate", "--rate", value, "true"), "rate") for value in ("0mbit", "1bit", "fast")),
    (("lab", "run", "--emulate", "--rates", "1mbit,,2mbit", "true"), "rate"),
    *((("report", path), path) for path in ("nobody", "garbage", "folder", "number.json", "nested.json")),
    (("report", "broken.jsonl"), "mode is 3"),
    (("bench", "nothing"), "no benchmark"),
    (("bench", "../x"), "no benchmark"),
    (("doctor", "--jason"), "--jason"),
    (("compressors", "--mark"), "--mark"),
    (("plans",), "plans"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "named"), TABLE, ids=lambda value: " ".join(value)[:90] if isinstance(value, tuple) else ""
)
def test_a_mistake_is_one_line_and_leaves_nothing(here: Path, words: tuple[str, ...], named: str) -> None:
    before = tree(here)
    assert named in mistaken(*words)
    assert tree(here) == before


def test_a_cache_that_cannot_be_written_is_found_before_probing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "garbage"))
    assert "the cache" in mistaken("probe", "--hosts", "2")


def test_outputs_are_written_where_they_can_be(here: Path) -> None:
    result = CliRunner().invoke(app, ["report", "run", "--out", "deep/er/page.html"])
    assert result.exit_code == 0, result.output
    assert (here / "deep" / "er" / "page.html").stat().st_size > 1000


def test_benchmarks_are_listed(here: Path) -> None:
    assert bench.find_repository(Path(bench.__file__)) is not None
    assert "step" in mistaken("bench", "nothing")
