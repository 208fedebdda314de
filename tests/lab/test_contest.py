"""The contest on the lab: a cell is predicted, measured, kept, and not run again."""

from pathlib import Path

import pytest
import typer
from benchmarks.contest import analysis
from benchmarks.contest.__main__ import bench_contest_command
from benchmarks.contest.cell import load_cells
from benchmarks.contest.lineup import workload_of
from benchmarks.contest.run import Job, run_job
from benchmarks.contest.sizes import Size
from benchmarks.contest.summary import summary
from typer.testing import CliRunner

from thinwire.lab import Lab, lab_available

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not lab_available()[0], reason=lab_available()[1] or "available"),
]
OPTIONS = ["--quick", "--hosts", "2", "--rates", "200mbit", "--rounds", "2", "--steps", "1"]


@pytest.mark.timeout(120)
def test_a_cell_is_measured_once(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(bench_contest_command)
    command = [*OPTIONS, "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "1 of 1 cells: tiny at 200mbit took" in done.output
    (cell,) = load_cells(tmp_path)
    assert all(len(score.turns_s) == 2 and min(score.turns_s) > 0 for score in cell.scores)
    sent = {score.contestant: score.sent_bytes for score in cell.scores}
    dense, hook = sent["stock DDP"], sent["DDP fp16 hook"]
    assert sent["floor"] < 0.01 * dense
    assert 0.45 * dense < hook < 0.6 * dense
    assert sent["DDP PowerSGD hook"] < 0.5 * dense  # past its dense steps
    assert sent["thinwire int4"] < 0.2 * dense
    assert len(analysis.predictions([cell])) == 7  # all of thinwire's, and stock DDP
    assert cell.plans[0]["round"] == 0
    assert "tiny" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    written_s = (tmp_path / "tiny-200mbit.json").stat().st_mtime_ns
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert "1 of 1 cells are done" in again.output
    assert (tmp_path / "tiny-200mbit.json").stat().st_mtime_ns == written_s


@pytest.mark.timeout(120)
def test_those_close_to_auto_take_more_turns() -> None:
    """At 20 Mbit/s dense takes several times as long as ``auto``: one turn shows that."""
    job = Job(workload_of("tiny"), "20mbit", 0, Size(rounds=1, steps_per_turn=1, seconds=0.0, close_rounds=2))
    with Lab(2) as lab:
        cell = run_job(job, lab, lambda: None)
    turns = {score.contestant: len(score.turns_s) for score in cell.scores}
    assert turns["stock DDP"] == turns["thinwire dense"] == 1
    assert turns["floor"] == turns["thinwire auto"] == 3
    assert "1-3 × 1" in summary([cell])
