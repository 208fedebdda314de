"""`thinwire bench contest` on the lab: a cell is predicted, measured, kept, and not run again."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli import app
from thinwire.contest import analysis
from thinwire.contest.cell import load_cells
from thinwire.lab import lab_available

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not lab_available()[0], reason=lab_available()[1] or "available"),
]
OPTIONS = ["--quick", "--hosts", "2", "--rates", "200mbit", "--rounds", "2", "--steps", "1"]


@pytest.mark.timeout(120)
def test_a_cell_is_measured_once(tmp_path: Path) -> None:
    command = ["bench", "contest", *OPTIONS, "--out", str(tmp_path)]
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
