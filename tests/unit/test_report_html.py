"""The report as files: one HTML page that needs no network, and TensorBoard logs."""

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli.commands import app
from thinwire.observe.events import EventWriter
from thinwire.observe.html.page import write_html
from thinwire.observe.runs import load_contests
from thinwire.observe.tensorboard import scalars, write_tensorboard

LABEL = "ours <b>&</b> theirs"


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "a-run"
    for name, mode in (("1", "floor"), ("2", "ddp"), ("3", "thinwire")):
        with EventWriter(directory / name / "rank0.jsonl") as events:
            events.write(
                "run", label=f"{LABEL} {mode}", mode=mode, rank=0, world_size=1, explanation=f"what {mode} did"
            )
            for step in range(5):
                seconds = {"wait_s": 0.0125} if mode == "thinwire" else {}
                events.write("step", step=step, loss=3.0, step_s=0.5, elapsed_s=0.5 * step, sent_bytes=9, **seconds)
            events.write("eval", step=4, loss=2.5, elapsed_s=2.5)
            events.write("end", steps=5, elapsed_s=2.5)
    return directory


def without_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_the_page_is_self_contained(run_directory: Path, tmp_path: Path) -> None:
    write_html(load_contests([run_directory]), tmp_path / "deep" / "report.html")
    page = (tmp_path / "deep" / "report.html").read_text()
    assert page.count("Plotly.newPlot(") >= 5
    assert not re.search(r"<script[^>]*\bsrc=|<link\b|@import|<img\b", without_scripts(page) + page[:5000])
    assert not re.search(r"<script[^>]+src=[\"']http", page)


def test_labels_are_escaped(run_directory: Path, tmp_path: Path) -> None:
    write_html(load_contests([run_directory]), tmp_path / "report.html")
    text = without_scripts((tmp_path / "report.html").read_text())
    assert "ours &lt;b&gt;&amp;&lt;/b&gt; theirs ddp" in text
    assert LABEL not in text


def test_thinwire_accounts_for_its_seconds(run_directory: Path, tmp_path: Path) -> None:
    write_html(load_contests([run_directory]), tmp_path / "report.html")
    assert "<td>12.5</td>" in (tmp_path / "report.html").read_text()


def test_report_command_writes_the_file(run_directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    result = CliRunner().invoke(app, ["report", str(run_directory), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.exists()
    assert "a-run" in result.output


def test_report_command_explains_a_wrong_path(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "no events found" in result.output


def test_tensorboard_logs_are_written_per_run(run_directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    write_tensorboard(load_contests([run_directory]), tmp_path / "tb")
    assert len(list((tmp_path / "tb" / "a-run").glob("*/events.out.tfevents.*"))) == 3


def test_tensorboard_scalars_cover_losses_and_steps(run_directory: Path) -> None:
    (contest,) = load_contests([run_directory])
    found = set(scalars(contest.runs[2]))
    assert {("loss/training", 3.0, 0), ("loss/evaluation", 2.5, 4), ("step/wait_s", 0.0125, 1)} <= found


def test_missing_tensorboard_says_what_to_install(
    run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"thinwire\[tensorboard\]"):
        write_tensorboard(load_contests([run_directory]), tmp_path / "tb")
