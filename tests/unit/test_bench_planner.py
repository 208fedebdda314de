"""The planner's benchmarks read their runs rightly, on made-up events."""

from __future__ import annotations

from pathlib import Path

from benchmarks.planner.falling_link import Follower, cut_to_common, story_of
from benchmarks.planner.time_to_loss import DENSE, finished_runs, line_up, markdown, outcomes

from thinwire.demo.contest import Network
from thinwire.observe.events import Event, EventWriter


def plan(step: int, compress: str) -> Event:
    return {"kind": "plan", "step": step, "compress": compress, "fuse": "auto", "step_s": 0.4}


def steps(first: int, end: int, step_s: float) -> list[Event]:
    return [{"kind": "step", "step": step, "step_s": step_s} for step in range(first, end)]


FALL = [
    *steps(0, 9, 0.3),
    plan(9, "dense"),
    *steps(9, 20, 0.2),
    *steps(20, 37, 1.0),
    plan(37, "int4"),
    *steps(37, 50, 0.5),
]


def test_the_story_of_a_fall() -> None:
    story = story_of([FALL, FALL], 20)
    assert (story.before, story.after) == ("dense, fuse=auto", "int4, fuse=auto")
    assert story.noticed_after_steps == story.settled_after_steps == 17
    assert story.plans == [(-11, "dense, fuse=auto"), (17, "int4, fuse=auto")]
    assert story.ranks_agree
    assert story.predicted_s == 0.4
    assert story.step_s == {"before": 0.2, "between": 1.0, "after": 0.5}


def test_ranks_that_switch_apart_are_seen() -> None:
    late = [event if event["kind"] != "plan" or event["step"] == 9 else plan(38, "int4") for event in FALL]
    assert not story_of([FALL, late], 20).ranks_agree
    unnoticed = [event for event in FALL if event != plan(37, "int4")]
    story = story_of([unnoticed, unnoticed], 20)
    assert (story.after, story.noticed_after_steps, story.step_s["after"]) == (None, None, None)


def test_several_plans_after_the_fall() -> None:
    story = story_of([[*FALL, plan(50, "int8"), *steps(50, 60, 0.7)]], 20)
    assert (story.noticed_after_steps, story.settled_after_steps) == (17, 30)
    assert story.after == "int8, fuse=auto"
    assert story.step_s == {"before": 0.2, "between": 1.0, "after": 0.7}


def test_a_rank_that_was_ended_early_does_not_disagree() -> None:
    short = [event for event in FALL if event["step"] < 37]
    cut = cut_to_common([FALL, short])
    assert cut[0] == cut[1] == short


def test_the_follower_ends_some_steps_after_the_next_plan() -> None:
    follower = Follower()
    for event in [*FALL, *steps(50, 67, 0.5)]:
        assert not follower.ends(20)
        with_version = {"v": 1, **event}
        follower(0, str(with_version).replace("'", '"'))
    assert follower.ends(20)
    follower(1, "a complaint")
    assert follower.said[-1] == "[host 1] a complaint"


def write_run(folder: Path, label: str, mode: str, losses: list[float], step_s: float) -> None:
    with EventWriter(folder / "rank0.jsonl") as events:
        events.write("run", label=label, mode=mode, rank=0, world_size=4, settings={}, started_at=folder.name)
        for index, loss in enumerate(losses):
            for step in range(10 * index, 10 * (index + 1)):
                events.write("step", step=step, step_s=step_s, elapsed_s=(step + 1) * step_s, loss=loss)
            events.write("eval", step=10 * index + 9, loss=loss, elapsed_s=10 * (index + 1) * step_s)
        events.write("end", steps=10 * len(losses), elapsed_s=10 * len(losses) * step_s)


def test_time_to_the_final_loss_of_dense(tmp_path: Path) -> None:
    write_run(tmp_path / DENSE, "stock DDP", "ddp", [3.0, 2.0, 1.0], 2.0)
    write_run(tmp_path / "2-auto", "thinwire auto", "thinwire", [3.0, 2.0, 1.1, 0.9], 1.0)
    write_run(tmp_path / "3-fp16", "DDP fp16 hook", "ddp_fp16", [3.0, 2.0, 1.005], 1.5)
    runs = finished_runs(tmp_path)
    found = {one.label: one for one in outcomes(list(runs.values()), 1.0)}
    assert found["stock DDP"].reached_s == 60.0
    assert found["thinwire auto"].reached_s == 35.0  # half-way between its last two evaluations
    assert found["thinwire auto"].steps == 40
    assert found["DDP fp16 hook"].reached_s is None
    assert found["DDP fp16 hook"].nearly_s is not None
    text = markdown(list(found.values()), "stock DDP")
    assert "35 s (0.58)" in text
    assert "not reached" in text


def test_a_run_that_was_stopped_is_run_again(tmp_path: Path) -> None:
    assert finished_runs(tmp_path / "nothing") == {}
    write_run(tmp_path / DENSE, "stock DDP", "ddp", [3.0], 2.0)
    path = tmp_path / DENSE / "rank0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert finished_runs(tmp_path) == {}


def test_the_others_train_longer_than_dense_and_are_evaluated_at_the_same_steps() -> None:
    dense, auto, *_, hook, _ = line_up("small", 300, Network(), [2, 8])
    assert (dense.workload.steps, auto.workload.steps) == (300, 340)
    evaluated = [[s for s in range(one.workload.steps) if one.workload.evaluates_after(s)] for one in (dense, auto)]
    assert evaluated[1][: len(evaluated[0])] == evaluated[0]
    assert (hook.mode, hook.powersgd_rank) == ("ddp_powersgd", 8)
