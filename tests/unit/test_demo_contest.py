"""The demo as a whole, on processes of an emulated network."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from thinwire.cli import demo as demo_command
from thinwire.cli.commands import app
from thinwire.demo.contender import interface_sent_bytes
from thinwire.demo.contest import Network, WorkerFailed, line_up, run_contest
from thinwire.demo.live import LiveView
from thinwire.demo.settings import Contestant, Workload
from thinwire.observe.events import Event
from thinwire.observe.runs import load_contests

TINY = ["--model", "tiny", "--hosts", "2", "--rate", "1gbit", "--steps", "4", "--batch", "1", "--seq", "16"]


class Recorder:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kinds: list[str] = []

    def started(self, contestant: Contestant) -> None:
        self.names.append(contestant.name)

    def event(self, contestant: Contestant, event: Event) -> None:
        self.kinds.append(event["kind"])


def test_the_real_network_has_stock_ddp_and_the_emulated_one_has_not() -> None:
    real = line_up(Workload(), Network(), ["auto", "int8"])
    emulated = line_up(Workload(), Network(emulated=True), ["auto"])
    assert [each.mode for each in real] == ["floor", "ddp", "thinwire", "thinwire"]
    assert [(each.mode, each.compress) for each in emulated[1:]] == [("thinwire", "dense"), ("thinwire", "auto")]
    assert "emulated" in emulated[1].label
    assert len({each.name for each in real}) == 4
    assert all(each.bits_per_s == 200_000_000 for each in real)


def test_sent_bytes_leave_loopback_out() -> None:
    table = (
        "Inter-|   Receive     |  Transmit\n face |bytes packets errs\n"
        "    lo:  1 2 3 4 5 6 7 8 999 10 11 12 13 14 15 16\n"
        "  eth0:  1 2 3 4 5 6 7 8 1000 10 11 12 13 14 15 16\n"
        "  eth1:1 2 3 4 5 6 7 8 234 10 11 12 13 14 15 16\n"
    )
    assert interface_sent_bytes(table) == 1234


@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_a_small_contest_runs_through(tmp_path: Path) -> None:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["demo", "--emulate", *TINY, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "EMULATED" in result.output
    (contest,) = load_contests([tmp_path / "run"])
    assert [(run.header["mode"], run.finished, len(run.ranks)) for run in contest.runs] == [
        ("floor", True, 2),
        ("thinwire", True, 2),
        ("thinwire", True, 2),
    ]
    first_losses = {run.training_loss()[0].loss for run in contest.runs}
    assert len(first_losses) == 1, "same weights and data: the first loss is the same for all"
    assert contest.runs[1].mean_per_step("sent_bytes") == pytest.approx(
        4 * contest.runs[1].header["parameters"], rel=0.05
    )
    assert "thinwire dense (emulated)" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.gloo
def test_a_failing_worker_is_quoted_and_stops_the_contest(tmp_path: Path) -> None:
    network = Network(hosts=2, emulated=True)
    contestants = line_up(Workload(model="huge", steps=1), network, ["auto"])
    watcher = Recorder()
    with pytest.raises(WorkerFailed, match="unknown model 'huge'"):
        run_contest(contestants, network, tmp_path, watcher)
    assert watcher.names == [one.name for one in contestants]
    assert watcher.kinds == []


def run_demo_with(monkeypatch: pytest.MonkeyPatch, out: Path, error: BaseException) -> tuple[int, str]:
    """Run the command with a contest that ends in ``error`` after its first contestant has written an event."""

    def contest(contestants: list[Contestant], network: Network, directory: Path, watcher: LiveView) -> None:
        from thinwire.observe.events import EventWriter

        with EventWriter(directory / "1-floor" / "rank0.jsonl") as events:
            events.write("run", label="floor", mode="floor", rank=0, world_size=2)
            for step in range(4):
                events.write("step", step=step, loss=1.0, step_s=0.25, elapsed_s=0.25 * step, sent_bytes=0)
        raise error

    monkeypatch.setattr("thinwire.demo.contest.run_contest", contest)
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["demo", "--emulate", *TINY, "--out", str(out)])
    return result.exit_code, result.output


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, output = run_demo_with(monkeypatch, tmp_path / "run", KeyboardInterrupt())
    assert code == 130
    assert "floor (stopped early)" in output
    assert "0.250 s" in output
    assert (tmp_path / "run" / "report.html").exists()


def test_a_failure_is_shown_and_fails_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, output = run_demo_with(monkeypatch, tmp_path / "run", WorkerFailed("host 1 [said] boom"))
    assert code == 1
    assert "host 1 [said] boom" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "huge"], "unknown model 'huge'"),
        (["--compress", "topq"], "unknown compressor 'topq'"),
        (["--rate", "fast"], "rate 'fast' is not a link rate"),
        (["--steps", "0"], "got 0, expected at least 1"),
    ],
)
def test_mistakes_are_found_before_anything_runs(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--emulate", "--out", str(tmp_path / "run"), *arguments])
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.output)
    assert not (tmp_path / "run").exists()


def test_a_used_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("")
    result = CliRunner().invoke(app, ["demo", "--emulate", *TINY, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty" in re.sub(r"\s+", " ", result.output)


def test_without_namespaces_the_demo_emulates_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.lab.lab_available", lambda: (False, "no root here"))
    console = Console(file=io.StringIO(), width=200)
    assert demo_command._must_emulate(console, asked=False)
    assert isinstance(console.file, io.StringIO)
    assert "no root here" in console.file.getvalue()


def test_the_live_view_shows_step_loss_time_and_bytes() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    contestant = Contestant(name="x", label="a label", mode="ddp", workload=Workload(steps=10))
    with LiveView(console) as view:
        view.started(contestant)
        view.event(contestant, {"kind": "eval", "loss": 3.25})
        for step in range(4):
            view.event(contestant, {"kind": "step", "step": step, "loss": 4.5, "step_s": 2.0, "sent_bytes": 3_000_000})
    assert isinstance(console.file, io.StringIO)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    for part in ("a label", "4/10", "loss 4.500", "eval 3.250", "2.00 s/step", "12 MB", "12 s left"):
        assert part in shown
