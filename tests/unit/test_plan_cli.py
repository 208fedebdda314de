"""`thinwire plan` and `thinwire probe` as a user types them, without a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import thinwire.api  # noqa: F401  (fills the registry)
from thinwire.cli.commands import app
from thinwire.observe.html.plan_page import write_plan_page
from thinwire.plan import Plan, profile_model
from thinwire.plan.codecs import measure_codec

runner = CliRunner()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Timing 768 × 768 matrices is for users; here small ones do.
    monkeypatch.setattr("thinwire.plan.measure_codec", lambda spec: measure_codec(spec, (32, 64), 1))
    return tmp_path / "cache"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    profile_model(model, torch.randn(8, 512), steps=1).save(path)
    return path


def run(*words: str) -> tuple[int, str]:
    result = runner.invoke(app, list(words))
    return result.exit_code, result.output


def test_a_cluster_that_is_not_here(profile: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    code, said = run(
        "plan",
        "--profile",
        str(profile),
        "--link",
        "10mbit,1ms",
        "--hosts",
        "64",
        "--json",
        str(out),
        "--html",
        str(page),
    )
    assert code == 0, said
    plan = Plan.load(out)
    assert plan.world_size == 64
    assert plan.compress == "int4"
    text = page.read_text(encoding="utf-8")
    for title in ("Roofline", "Timeline", "Which method wins where", "thinwire plan"):
        assert title in text


def test_the_predicted_step_is_drawn(profile: Path) -> None:
    words = ("plan", "--profile", str(profile), "--link", "10mbit,1ms")
    code, said = run(*words, "--draw")
    assert code == 0, said
    lanes = [line.split()[0] for line in said.splitlines() if line.startswith(("backward", "encode", "wire", "decode"))]
    assert lanes == ["backward", "encode", "wire", "decode"]
    assert "message(s), backward" in said
    assert "message(s)" not in run(*words)[1]


def test_a_target_is_profiled_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_target.py").write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n    return nn.Linear(64, 64), torch.randn(8, 64)\n"
    )
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "kept.json"
    code, said = run("plan", "cli_target.py:make", "--link", "100gbit,1us", "--hosts", "2", "--save-profile", str(kept))
    assert code == 0, said
    assert "dense" in said
    assert json.loads(kept.read_text())["tensors"][0]["shape"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--link", "10mbit"], "either a target"),
        (["x:y", "--profile", "p", "--link", "10mbit"], "either a target"),
        (["x:y"], "thinwire probe first"),
        (["x:y", "--link", "soon"], "such as"),
        (["no_such_module_at_all:make", "--link", "10mbit"], "cannot import"),
        (["x:y", "--link", "10mbit", "--backend", "mpi"], "gloo or nccl"),
    ],
)
def test_mistakes_are_one_message(words: list[str], hint: str) -> None:
    code, said = run("plan", *words)
    assert code == 2
    assert hint in " ".join(said.split())
    assert "Traceback" not in said


def test_a_page_needs_no_sweep(profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    run("plan", "--profile", str(profile), "--link", "10mbit", "--json", str(out))
    write_plan_page(json.loads(out.read_text()), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Which method wins where" not in text
    assert "Timeline" in text


def test_probe_refuses_hosts_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, said = run("probe", "--hosts", "2")
    assert code == 2
    assert "leave --hosts and --rate out" in " ".join(said.split())
