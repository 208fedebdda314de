"""The doctor: says what was found, and fails only for what is essential."""

import builtins
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from thinwire.cli import doctor
from thinwire.cli.commands import app
from thinwire.cli.doctor import Finding


def test_json_lists_every_check_once() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    names = [finding["name"] for finding in json.loads(result.stdout)]
    expected = {"torch", "gloo", "nccl", "mpi", "threads", "kernels", "triton", "cores", "compiler", "namespaces"}
    assert set(names) == expected
    assert len(names) == len(expected)


def test_the_table_shows_findings_and_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("thing", "warn", "odd [x]", "do this")])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert all(part in result.output for part in ("thing", "warn", "odd [x]", "do this"))


def test_missing_torch_fails_and_is_the_first_thing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    really_import = builtins.__import__

    def without_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise ImportError("no torch")
        return really_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    finding = doctor.look_at_torch()
    assert (finding.status, finding.name) == ("missing", "torch")
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "look_at_torch", lambda: finding)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)[0]["advice"] == "install it: pip install torch"


def test_old_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.5.1+cpu")
    assert doctor.look_at_torch().status == "missing"
    monkeypatch.setattr("torch.__version__", "2.10.0")
    assert doctor.look_at_torch().status == "ok"


def test_no_backend_at_all_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gloo", "nccl", "mpi"):
        monkeypatch.setattr(f"torch.distributed.is_{name}_available", lambda: False)
    assert "missing" in {finding.status for finding in doctor.look_at_backends()}


def test_plain_torch_kernels_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.kernels.backend", lambda: "reference")
    monkeypatch.setattr(doctor, "find_compiler", lambda: None)
    finding = doctor.look_at_kernels()
    assert finding.status == "warn"
    assert finding.advice.startswith("install a C compiler")


def test_a_lab_that_cannot_run_passes_the_reason_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.lab.lab_available", lambda: (False, "because"))
    finding = doctor.look_at_lab()
    assert (finding.status, finding.advice) == ("warn", "because")


def test_a_broken_check_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_at_cores() -> Finding:
        raise OSError("broken machine")

    monkeypatch.setattr(doctor, "look_at_cores", look_at_cores)
    findings = doctor.examine()
    assert Finding("cores", "warn", "OSError: broken machine", "this check itself failed; please report it") in findings
    assert "namespaces" in {finding.name for finding in findings}


@pytest.mark.parametrize(("cores", "status"), [(1, "warn"), (2, "ok")])
def test_one_core_is_a_warning(monkeypatch: pytest.MonkeyPatch, cores: int, status: str) -> None:
    monkeypatch.setattr(doctor, "usable_cores", lambda: cores)
    assert doctor.look_at_cores().status == status
