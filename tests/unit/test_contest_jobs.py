"""The contest before it runs: who takes part, how long it takes, what is skipped, what is predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.contest.cell import CellError
from benchmarks.contest.lineup import AUTO, FLOOR, MODELS, RATES, STOCK_DDP, line_up, ours, workload_of
from benchmarks.contest.predict import DDP_FIRST_BUCKET_BYTES, ddp_buckets, predictions_s, with_codecs
from benchmarks.contest.run import Job, make_cell, plan_jobs
from benchmarks.contest.sizes import (
    FEWEST_STEPS,
    MOST_ROUNDS,
    MOST_STEPS,
    START_S,
    CellCost,
    Size,
    cost_of_cell,
    estimate_step_s,
    seconds_left,
    size_cells,
)
from benchmarks.step.interleaved import WARMUP_STEPS

import thinwire.api  # noqa: F401  (fills the registry)
from thinwire.autopilot.measure import codec_costs
from thinwire.core import TensorSpec
from thinwire.demo.model import build_model
from thinwire.fusion import TensorProfile
from thinwire.observe.events import Event
from thinwire.plan import Cluster, Link, ModelProfile, Pricer, choose, network_of_link

TENSORS = [TensorSpec(f"layer{i}.weight", (1000, 1000)) for i in range(5)]
JOB = Job(workload_of("small"), "200mbit", 5_000_000, Size(2, 1, 60.0))


def steps_s(rate: str, floor_s: float = 1.0) -> dict[str, float]:
    return {one.name: estimate_step_s(one, TENSORS, floor_s, 4) for one in line_up(workload_of("small"), rate)}


def test_everybody_takes_part_in_every_cell() -> None:
    contestants = line_up(workload_of("cnn"), "20mbit")
    assert [one.mode for one in contestants[:4]] == ["floor", "ddp", "ddp_fp16", "ddp_powersgd"]
    assert [one.compress for one in contestants[4:]] == ["dense", "bf16", "int8", "int4", "topk(density=0.01)", "auto"]
    assert len({one.name for one in contestants}) == 10
    assert {one.bits_per_s for one in contestants} == {20_000_000}


def test_slow_links_are_estimated_by_their_bytes() -> None:
    slow, slower = steps_s("40mbit"), steps_s("20mbit")
    wire_s = 1.5 * 4 * 5e6 * 8 / 20e6  # a ring of four sends 2 * 3 / 4 of the gradients
    assert slower[STOCK_DDP] == pytest.approx(1.1 + 1.06 * wire_s)
    assert slower[STOCK_DDP] - 1.1 == pytest.approx(2 * (slow[STOCK_DDP] - 1.1))
    assert slower["DDP fp16 hook"] - 1.1 == pytest.approx((slower[STOCK_DDP] - 1.1) / 2, rel=0.01)
    assert slower[FLOOR] == 1.0
    assert slower[AUTO] == slower[ours("int4")] < slower[ours("int8")] < slower[ours("bf16")]


def test_auto_measures_dense_steps_before_it_plans() -> None:
    contestants = line_up(workload_of("small"), "20mbit")
    auto_alone = [one for one in contestants if one.name in (AUTO, STOCK_DDP)]
    dense_s = steps_s("20mbit")[STOCK_DDP]
    assert cost_of_cell(auto_alone, TENSORS, 1.0, 4).fixed_s > 9 * dense_s


def test_everybody_but_the_floor_gets_the_weights_first() -> None:
    two = [one for one in line_up(workload_of("small"), "20mbit") if one.name in (FLOOR, STOCK_DDP)]
    cost = cost_of_cell(two, TENSORS, 1.0, 4)
    weights_s = cost.fixed_s - START_S - WARMUP_STEPS * cost.step_s
    assert weights_s == pytest.approx(2 * 32 * sum(tensor.numel for tensor in TENSORS) / 20e6, rel=0.1)


def test_sizes_fill_the_budget_and_do_not_exceed_it() -> None:
    costs = [CellCost(30.0, step_s) for step_s in (60.0, 20.0, 5.0, 1.0)]
    sizes = size_cells(costs, 1500.0)
    assert 0.7 * 1500 < sum(size.seconds for size in sizes) <= 1500
    steps = [size.rounds * size.steps_per_turn for size in sizes]
    assert steps == sorted(steps)
    assert all(FEWEST_STEPS <= one <= MOST_STEPS for one in steps)
    assert max(size.rounds for size in sizes) == MOST_ROUNDS


def test_those_close_to_auto_have_more_turns_in_the_estimate() -> None:
    """At 20 Mbit/s that is the floor, and whoever sends as little as ``auto`` or less; without a limit everybody."""
    slow, fast = (cost_of_cell(line_up(workload_of("small"), rate), TENSORS, 1.0, 4) for rate in ("20mbit", "unshaped"))
    close = [FLOOR, "DDP PowerSGD hook", ours("int4"), ours("topk(density=0.01)"), AUTO]
    assert slow.close_step_s == pytest.approx(sum(steps_s("20mbit")[name] for name in close))
    assert fast.close_step_s == pytest.approx(fast.step_s)
    (size,) = size_cells([slow], 0.0)
    assert size.close_rounds == MOST_ROUNDS - FEWEST_STEPS
    turns_s = FEWEST_STEPS * slow.step_s + size.close_rounds * slow.close_step_s
    assert size.seconds == pytest.approx(slow.fixed_s + turns_s)


def test_where_nothing_fits_the_estimate_says_so() -> None:
    costs = [CellCost(30.0, 60.0)] * 3
    sizes = size_cells(costs, 10.0)
    assert {(size.rounds, size.steps_per_turn) for size in sizes} == {(FEWEST_STEPS, 1)}
    assert sum(size.seconds for size in sizes) == pytest.approx(3 * (30 + FEWEST_STEPS * 60))


def test_a_whole_contest_is_sized_to_ninety_minutes() -> None:
    floors_s = {"small": 0.9, "lstm": 0.6, "cnn": 0.2}
    shapes = {
        model: [TensorSpec(name, tuple(p.shape)) for name, p in build_model(model, 128, 0).named_parameters()]
        for model in MODELS
    }
    costs = [
        cost_of_cell(line_up(workload_of(model), rate), shapes[model], floors_s[model], 4)
        for model in MODELS
        for rate in RATES
    ]
    assert 60 * 60 < sum(size.seconds for size in size_cells(costs, 90 * 60)) <= 90 * 60


def test_time_left_learns_from_what_the_done_cells_took() -> None:
    assert seconds_left([], [10.0, 20.0]) == 30.0
    assert seconds_left([(10.0, 15.0), (10.0, 25.0)], [10.0, 20.0]) == 60.0


def test_jobs_are_sized_as_asked() -> None:
    jobs = plan_jobs(["tiny"], ["0.2gbit", "unshaped"], 2, 60.0, rounds=3, steps=5)
    assert [(job.rate, job.size.rounds, job.size.steps_per_turn, job.size.close_rounds) for job in jobs] == [
        ("200mbit", 3, 5, 0),
        ("unshaped", 3, 5, 0),
    ]
    assert jobs[0].parameters == sum(p.numel() for p in build_model("tiny", 128, 0).parameters())
    with pytest.raises(ValueError, match="unknown model 'huge'"):
        plan_jobs(["huge"], ["unshaped"], 2, 60.0)


def events() -> list[Event]:
    written: list[Event] = [{"kind": "prediction", "step_s": {AUTO: 1.5, STOCK_DDP: 2.5}}]
    written.append({"v": 1, "kind": "plan", "round": 0, "compress": "int4", "facts": {"planning_s": "2.0"}})
    for turn, warmup in ((9.0, True), (1.0, False), (3.0, False)):
        for one in JOB.turns.contestants:
            named = {"contestant": one.name, "warmup": warmup}
            written.append({"kind": "step", "step_s": 7.0, "sent_bytes": 10 * turn, **named})
            written.append({"kind": "turn", "step_s": turn, **named})
    return written


def test_a_cell_has_the_turns_without_the_warmup() -> None:
    cell = make_cell(JOB, events(), hosts=4, duration_s=50.0, load=0.1)
    assert [score.contestant for score in cell.scores] == [one.name for one in JOB.turns.contestants]
    auto, floor = cell.score(AUTO), cell.score(FLOOR)
    assert auto is not None
    assert floor is not None
    assert (auto.turns_s, auto.sent_bytes, auto.predicted_s) == ((1.0, 3.0), 20.0, 1.5)
    assert floor.predicted_s is None
    assert cell.plans == ({"round": 0, "compress": "int4", "facts": {"planning_s": "2.0"}},)


def test_what_is_done_is_kept_and_what_differs_is_refused(tmp_path: Path) -> None:
    assert JOB.done(tmp_path, 4) is None
    cell = make_cell(JOB, events(), hosts=4, duration_s=50.0, load=0.1)
    cell.save(JOB.path(tmp_path))
    assert JOB.done(tmp_path, 4) == cell
    with pytest.raises(CellError, match="choose another --out"):
        JOB.done(tmp_path, 2)
    other = replace(JOB, rate="50mbit")
    assert other.done(tmp_path, 4) is None


def test_ddp_buckets_are_closed_by_the_tensor_that_fills_them() -> None:
    half = TensorSpec("half", (DDP_FIRST_BUCKET_BYTES // 8,))
    names = [replace(half, fqn=f"t{i}") for i in range(53)]
    groups = ddp_buckets(names)
    assert [len(group) for group in groups] == [2, 50, 1]
    assert [tensor for group in groups for tensor in group] == names
    assert ddp_buckets([]) == []


def test_everybody_but_the_hooks_is_predicted_from_the_same_measurements() -> None:
    torch.set_num_threads(1)
    profile = ModelProfile(
        tensors=tuple(TensorProfile(TensorSpec(f"t{i}", (256, 256)), 0.01 * (i + 1)) for i in range(8)),
        forward_s=0.05,
        backward_s=0.1,
        optimizer_s=0.0,
        flops=0.0,
        memory_bytes=0.0,
    )
    cluster = Cluster(world_size=4, cores=8)
    network = network_of_link(Link(50e6, 1e-4), 4)
    codecs = codec_costs(["dense", "bf16", "int8", "int4"], profile.specs)
    pricer = Pricer(profile, network, codecs, cluster)
    plan = choose(profile, network, codecs, cluster)
    contestants = line_up(workload_of("small"), "50mbit")
    with pytest.raises(ValueError, match="was not measured"):
        predictions_s(pricer, plan, contestants)
    predicted = predictions_s(with_codecs(pricer, ["topk(density=0.01)", "int4"]), plan, contestants)
    assert predicted.keys() == {one.name for one in contestants if "hook" not in one.name}
    assert predicted[AUTO] == plan.step_s
    assert predicted[FLOOR] == pytest.approx(0.15)
    assert predicted[ours("int4")] < predicted[ours("int8")] < predicted[ours("dense")]
    # Two buckets in place of tapered groups, and no agreement: one message of 2 MiB less hidden, not much else.
    assert predicted[STOCK_DDP] == pytest.approx(predicted[ours("dense")], rel=0.3)
    assert predicted[STOCK_DDP] > 0.15 + 1.5 * 1e6 * 8 / 50e6
