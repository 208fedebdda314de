"""The closing figures, on runs whose every number is known."""

from pathlib import Path
from typing import Any

import pytest

from thinwire.observe.events import EventError, EventWriter
from thinwire.observe.runs import Contest, Point, load_contests
from thinwire.observe.summary import COLUMNS, Row, choices, format_cells, headlines, summarise, time_to_loss

STEPS = 12


def write_run(
    directory: Path,
    mode: str,
    step_s: float,
    losses: tuple[float, ...] = (4.0, 3.0),
    sent_bytes: int = 0,
    compress: str = "auto",
    started_at: str = "0",
    end: bool = True,
) -> None:
    """Two ranks, ``STEPS`` equal steps, evaluations at equal distances; the second rank is 0.02 s slower per step."""
    for rank in range(2):
        with EventWriter(directory / f"rank{rank}.jsonl") as events:
            header: dict[str, Any] = {"label": directory.name, "mode": mode, "rank": rank, "world_size": 2}
            events.write("run", **header, started_at=started_at, settings={"compress": compress})
            own_s = step_s + 0.02 * rank
            for step in range(STEPS):
                slow_start_s = 100.0 if step == 0 else own_s  # must not count in any median
                elapsed_s = own_s * (step + 1)
                events.write(
                    "step", step=step, loss=1.0 + rank, step_s=slow_start_s, elapsed_s=elapsed_s, sent_bytes=sent_bytes
                )
                for index, loss in enumerate(losses):
                    if step + 1 == STEPS * (index + 1) // len(losses):
                        events.write("eval", step=step, loss=loss, elapsed_s=elapsed_s)
            if end:
                events.write("end", steps=STEPS, elapsed_s=own_s * STEPS)


@pytest.fixture
def contest(tmp_path: Path) -> Contest:
    write_run(tmp_path / "floor", "floor", 0.49, losses=(9.0, 9.0), started_at="1")
    write_run(tmp_path / "dense", "ddp", 1.49, losses=(4.0, 3.0), sent_bytes=20_000_000, started_at="2")
    write_run(tmp_path / "ours", "thinwire", 0.54, losses=(3.6, 3.03), sent_bytes=500_000, started_at="3")
    (contest,) = load_contests([tmp_path])
    return contest


def row(contest: Contest, label: str) -> Row:
    return next(row for row in summarise(contest) if row.label == label)


def test_runs_come_in_the_order_they_ran(contest: Contest) -> None:
    assert [row.label for row in summarise(contest)] == ["floor", "dense", "ours"]


def test_step_times_are_medians_over_all_ranks_without_the_warm_up(contest: Contest) -> None:
    assert row(contest, "floor").median_step_s == pytest.approx(0.50)
    assert row(contest, "dense").times_floor == pytest.approx(3.0)
    assert row(contest, "ours").times_floor == pytest.approx(1.1)


def test_figures_of_a_run_that_plans_begin_with_its_plan(tmp_path: Path) -> None:
    """Dense steps in which it measures are its warm-up, and what it chose is said below the table."""
    with EventWriter(tmp_path / "rank0.jsonl") as events:
        events.write("run", label="ours", mode="thinwire", rank=0, world_size=1)
        for step in range(12):
            step_s = 2.0 if step < 10 else 0.5
            events.write("step", step=step, loss=1.0, step_s=step_s, elapsed_s=step_s, sent_bytes=1)
            if step == 8:
                times = {"step_s": 0.5, "dense_s": 2.0, "floor_s": 0.4}
                events.write("plan", step=9, compress="int4", fuse="4MiB", explanation="because", **times)
    (contest,) = load_contests([tmp_path])
    assert row(contest, "ours").median_step_s == 0.5
    (sentence,) = choices(contest)
    assert sentence.startswith("ours chose int4 (fuse=4MiB) after 9 steps: 0.5 s predicted, dense 2 s")


def test_the_floor_has_no_loss(contest: Contest) -> None:
    floor = row(contest, "floor")
    assert floor.evaluation_loss is None
    assert format_cells(floor)[COLUMNS.index("eval loss")] == "n/a"


def test_the_loss_is_compared_with_dense(contest: Contest) -> None:
    assert row(contest, "ours").loss_against_dense == pytest.approx(0.01)


def test_training_time_is_that_of_the_slowest_rank(contest: Contest) -> None:
    assert row(contest, "dense").training_s == pytest.approx(1.51 * STEPS)


def test_time_to_the_dense_loss(contest: Contest) -> None:
    # within 1 % of dense's 3.0: ours ends at 3.03, so exactly at its end; dense itself shortly before its own
    assert row(contest, "ours").dense_loss_after_s == pytest.approx(0.54 * STEPS)
    assert row(contest, "dense").dense_loss_after_s == pytest.approx(1.49 * (6 + 0.97 * 6))


def test_headline_states_speed_bytes_and_loss(contest: Contest) -> None:
    (line,) = headlines(summarise(contest))
    assert line == "ours against dense: 2.73 × the speed, 1/40 of the bytes, evaluation loss +1.0%."


def test_thinwire_dense_stands_in_for_ddp(tmp_path: Path) -> None:
    write_run(tmp_path / "emulated", "thinwire", 1.0, compress="dense")
    (contest,) = load_contests([tmp_path])
    assert contest.dense is not None
    assert contest.dense.label == "emulated"


def test_a_run_that_was_stopped_says_so_and_is_no_reference(tmp_path: Path) -> None:
    write_run(tmp_path / "dense", "ddp", 1.0, end=False)
    write_run(tmp_path / "ours", "thinwire", 1.0)
    (contest,) = load_contests([tmp_path])
    assert format_cells(row(contest, "dense"))[0] == "dense (stopped early)"
    assert row(contest, "ours").loss_against_dense is None


def test_without_a_floor_there_is_no_factor(tmp_path: Path) -> None:
    write_run(tmp_path / "ours", "thinwire", 1.0)
    (contest,) = load_contests([tmp_path])
    assert row(contest, "ours").times_floor is None


def test_several_directories_are_several_contests(tmp_path: Path) -> None:
    for name in ("monday", "tuesday"):
        write_run(tmp_path / name / "ours", "thinwire", 1.0)
    contests = load_contests([tmp_path / "monday", tmp_path / "tuesday"])
    assert [contest.directory.name for contest in contests] == ["monday", "tuesday"]


def test_one_file_is_enough(tmp_path: Path) -> None:
    write_run(tmp_path / "ours", "thinwire", 1.0)
    (contest,) = load_contests([tmp_path / "ours" / "rank1.jsonl"])
    assert contest.runs[0].training_loss()[0].loss == 2.0


def test_training_loss_is_the_mean_over_ranks(contest: Contest) -> None:
    assert {point.loss for point in contest.runs[0].training_loss()} == {1.5}


def test_nothing_found_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(EventError, match="no events found"):
        load_contests([tmp_path])


@pytest.mark.parametrize(("target", "expected_s"), [(5.0, 10.0), (4.0, 10.0), (3.0, 15.0), (2.0, 20.0), (1.9, None)])
def test_time_to_loss_interpolates(target: float, expected_s: float | None) -> None:
    points = [Point(0, 10.0, 4.0), Point(1, 20.0, 2.0), Point(2, 30.0, 3.0)]
    assert time_to_loss(points, target) == expected_s


def test_a_loss_a_hair_below_dense_is_not_minus_zero(tmp_path: Path) -> None:
    write_run(tmp_path / "dense", "ddp", 1.0, losses=(4.0, 3.0))
    write_run(tmp_path / "ours", "thinwire", 1.0, losses=(4.0, 2.9999))
    (contest,) = load_contests([tmp_path])
    assert format_cells(row(contest, "ours"))[COLUMNS.index("eval loss")] == "3.000 (+0.0%)"
