"""What the contest makes of its cells, on made-up ones whose answers are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.contest import analysis
from benchmarks.contest.cell import Cell, CellError, Score, load_cells
from benchmarks.contest.lineup import AUTO, FLOOR, STOCK_DDP, ours
from benchmarks.contest.page import contestant_colours, step_times, write_page
from benchmarks.contest.summary import in_order, summary


def score(name: str, *turns_s: float, predicted_s: float | None = None) -> Score:
    return Score(contestant=name, turns_s=turns_s, sent_bytes=1e6, predicted_s=predicted_s)


def plan(compress: str, planning_s: float = 3.0) -> dict[str, Any]:
    return {"round": 0, "compress": compress, "fuse": "auto", "facts": {"planning_s": f"{planning_s}"}}


def cell(model: str, rate: str, *scores: Score, plans: tuple[dict[str, Any], ...] = ()) -> Cell:
    return Cell(
        model=model,
        rate=rate,
        hosts=4,
        batch=7,
        seq=128,
        parameters=4_900_000,
        steps_per_turn=2,
        duration_s=100.0,
        scores=scores,
        plans=plans,
        facts={"date": "2026-01-01", "load_before": "0.50"},
    )


# The machine is twice as slow in the last round: medians drift, ratios within a round do not.
SLOW = cell(
    "small",
    "200mbit",
    score(FLOOR, 1.0, 1.0, 2.0, predicted_s=0.5),
    score(STOCK_DDP, 2.0, 2.0, 4.0, predicted_s=2.2),
    score("DDP fp16 hook", 1.5, 1.5, 3.0),
    score(ours("dense"), 2.1, 2.1, 4.2, predicted_s=2.1),
    score(ours("int4"), 1.0, 1.0, 2.0, predicted_s=0.8),
    score(ours("topk(density=0.01)"), 0.9, 0.9, 1.8, predicted_s=0.9),
    score(AUTO, 1.04, 1.04, 2.2, predicted_s=1.04),
    plans=(plan("int4", 4.0),),
)
FAST = cell(
    "small",
    "unshaped",
    score(FLOOR, 1.0, 1.0),
    score(STOCK_DDP, 1.0, 1.0),
    score(ours("dense"), 1.0, 1.0),
    score(ours("int4"), 1.2, 1.2),
    score(AUTO, 1.10, 1.10, predicted_s=1.0),
    plans=(plan("dense"), plan("int4")),
)


def test_errors_are_of_those_who_communicate_and_were_predicted() -> None:
    found = analysis.predictions([SLOW])
    assert FLOOR not in [one.contestant for one in found]
    errors = {one.contestant: one.error for one in found}
    assert errors == pytest.approx(
        {STOCK_DDP: 0.1, ours("dense"): 0.0, ours("int4"): -0.2, ours("topk(density=0.01)"): 0.0, AUTO: 0.0}
    )
    summed = analysis.errors_of(found)
    assert summed is not None
    assert (summed.count, summed.median, summed.bias) == pytest.approx((5, 0.0, 0.0))
    assert summed.worst.contestant == ours("int4")
    assert analysis.errors_of([]) is None


def test_errors_by_contestant_are_over_all_cells() -> None:
    by_name = analysis.errors_by_contestant(analysis.predictions([SLOW, FAST]))
    assert by_name[AUTO].count == 2
    assert by_name[AUTO].worst.rate == "unshaped"
    assert by_name[AUTO].worst.error == pytest.approx(1 / 1.1 - 1)
    assert by_name[STOCK_DDP].count == 1


def test_regret_is_against_the_best_of_the_same_quality_class() -> None:
    slow, fast = analysis.regrets([SLOW, FAST])
    assert slow.other == ours("int4")  # topk is faster, but auto may not choose it
    assert slow.ratio == pytest.approx(1.04)
    assert (slow.low, slow.high) == pytest.approx((1.04, 1.088))
    assert not slow.exceeds(0.05)
    assert fast.other == ours("dense")
    assert fast.ratio == pytest.approx(1.10)
    assert fast.clearly_exceeds(0.05)
    assert not fast.exceeds(0.11)


def test_never_slower_is_seen_in_every_cell() -> None:
    slow, fast = analysis.against_ddp([SLOW, FAST])
    assert slow.ratio == pytest.approx(0.52)
    assert not slow.exceeds(0.03)
    assert fast.exceeds(0.03)


def test_drift_of_the_machine_does_not_change_ratios() -> None:
    drifting = replace(
        SLOW,
        scores=tuple(
            replace(one, turns_s=tuple(t * f for t, f in zip(one.turns_s, (1, 3, 9), strict=True)))
            for one in SLOW.scores
        ),
    )
    assert analysis.regrets([drifting])[0].ratio == pytest.approx(analysis.regrets([SLOW])[0].ratio)


def test_whoever_took_fewer_turns_is_compared_in_those() -> None:
    auto = score(AUTO, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0)
    cell = replace(SLOW, scores=(score(STOCK_DDP, 2.0, 2.0, 2.0), auto))
    assert analysis.against_ddp([cell])[0].ratio == pytest.approx(0.5)


def test_a_cell_without_auto_has_nothing_to_compare() -> None:
    without = replace(SLOW, scores=tuple(one for one in SLOW.scores if one.contestant != AUTO), plans=())
    assert analysis.regrets([without]) == analysis.against_ddp([without]) == []
    assert analysis.planning_s([without]) == []
    assert "slower than stock DDP" not in summary([without])


def test_summary_says_what_was_missed_and_where() -> None:
    text = summary([FAST, SLOW])
    goals = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert "**no**" in goals["regret against the best fixed setting"]
    assert "small at unshaped" in goals["regret against the best fixed setting"]
    assert "over in 1 of 2 cells" in goals["slower than stock DDP"]
    assert "yes" in goals["above the floor, small at 200mbit"]
    assert "yes" in goals["prediction error, worst"]
    assert "4.0 s" in goals["longest planning"]
    assert "dense (auto) → int4 (auto)" in text
    assert "2 cells on 4 hosts (19 of the 21 cells" in text
    assert "1.04 (1.04-1.97; 1.04)" in text  # auto at 200mbit
    assert "No cell is done yet" in summary([])


def test_cells_are_ordered_by_rate_not_by_letter() -> None:
    cells = [replace(SLOW, rate=rate) for rate in ("unshaped", "1gbit", "20mbit", "500mbit")]
    assert [one.rate for one in in_order(cells)] == ["20mbit", "500mbit", "1gbit", "unshaped"]


def test_a_cell_survives_its_file(tmp_path: Path) -> None:
    SLOW.save(tmp_path / "small-200mbit.json")
    assert load_cells(tmp_path) == [SLOW]
    (tmp_path / "notes.json").write_text("[1]")
    with pytest.raises(CellError, match=r"notes\.json is no cell"):
        load_cells(tmp_path)


def test_the_page_has_a_panel_per_model_and_all_contestants(tmp_path: Path) -> None:
    cells = [SLOW, FAST, replace(FAST, model="cnn")]
    colours = contestant_colours(cells)
    assert len(set(colours.values())) == len(colours) == len(SLOW.scores)
    figure = step_times([SLOW, FAST], colours)
    lines = {trace.name: list(trace.y) for trace in figure.data}
    assert lines[AUTO] == [1.04, 1.10]
    assert lines["DDP fp16 hook"] == [1.5]  # it has no score in the other cell
    write_page(cells, tmp_path / "contest.html")
    text = (tmp_path / "contest.html").read_text(encoding="utf-8")
    assert all(f"{model}: step by link rate" in text for model in ("small", "cnn"))
