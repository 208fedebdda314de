"""Choosing: dense where nothing helps, fewer bytes where they do, and budgets that hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire.api  # noqa: F401  (fills the registry)
from thinwire.comm.piggyback import flag_elems
from thinwire.core import ConfigError, TensorSpec, make
from thinwire.fusion import Curve, TensorProfile
from thinwire.plan import (
    Budget,
    Cluster,
    CodecCost,
    Link,
    ModelProfile,
    Noise,
    Plan,
    Pricer,
    candidate_specs,
    choose,
    network_of_link,
)
from thinwire.plan.collectives import Kind
from thinwire.plan.messages import Asked
from thinwire.plan.roofline import roofline
from thinwire.plan.roofs import Roofs
from thinwire.plan.search import best_fusion, error_limit
from thinwire.plan.sweep import sweep_rates

CLUSTER = Cluster(world_size=4, cores=8)
SLOW, FAST = Link(50e6, 1e-3), Link(100e9, 1e-6)
LAYERS = 12


def model(noise: float | None = 4.0) -> ModelProfile:
    specs = [TensorSpec(f"layer{i}.weight", (256, 256)) for i in reversed(range(LAYERS))] + [TensorSpec("bias", (256,))]
    tensors = tuple(TensorProfile(spec, 0.005 * (i + 1)) for i, spec in enumerate(specs))
    return ModelProfile(
        tensors=tensors,
        forward_s=0.03,
        backward_s=0.07,
        optimizer_s=0.005,
        flops=2e9,
        memory_bytes=3e7,
        batch=8,
        noise={} if noise is None else {spec.fqn: Noise(1.0, noise) for spec in specs},
    )


def codec(rounds: list[Kind], seconds_per_elem: float, error: float) -> CodecCost:
    line = Curve(((1.0, 1e-5), (1e6, 1e-5 + 1e6 * seconds_per_elem)))
    stages = (line,) * (len(rounds) + 1)
    return CodecCost(tuple((Asked(kind, 1 / len(rounds)),) for kind in rounds), {2: stages, 8: stages}, error)


CODECS = {
    "dense": codec(["all_reduce"], 1e-10, 0.0),
    "bf16": codec(["all_to_all", "all_gather"], 1e-9, 3e-6),
    "int8": codec(["all_to_all", "all_gather"], 1e-9, 5e-5),
    "int4": codec(["all_to_all", "all_gather"], 1e-9, 0.012),
    "topk(density=0.01)": codec(["all_gather"], 2e-9, 0.9),
}


def plan_on(link: Link, budget: Budget | None = None, profile: ModelProfile | None = None) -> Plan:
    return choose(profile or model(), network_of_link(link, 4), CODECS, CLUSTER, budget=budget)


def test_dense_wins_where_the_network_is_no_problem() -> None:
    plan = plan_on(FAST)
    assert plan.compress == "dense"
    assert "best sent as they are" in " ".join(plan.reasons)


def test_fewer_bytes_win_on_a_slow_link() -> None:
    plan = plan_on(SLOW)
    assert plan.compress == "int4"
    assert plan.speedup > 2
    assert plan.floor_s <= plan.step_s < plan.dense_s


@pytest.mark.parametrize(("quality", "chosen"), [("exact", "bf16"), ("safe", "int4"), ("fast", "topk(density=0.01)")])
def test_quality_bounds_the_error(quality: str, chosen: str) -> None:
    budget = Budget(quality=quality, experimental=True)  # type: ignore[arg-type]
    assert plan_on(Link(10e6, 1e-4), budget).compress == chosen


def test_experimental_methods_only_when_asked() -> None:
    plan = plan_on(Link(10e6, 1e-4), Budget(quality="fast"))
    assert plan.compress == "int4"
    assert "topk(density=0.01)" not in [one.compress for one in plan.candidates]
    assert "topk" not in " ".join(candidate_specs())
    assert any(spec.startswith("topk") for spec in candidate_specs(experimental=True))
    assert candidate_specs()[0] == "dense"


def test_every_candidate_can_be_read_back() -> None:
    specs = candidate_specs(experimental=True)
    assert [str(make(spec)) for spec in specs] == specs
    assert "topk(density=0.01) | int8" in specs  # precision is searched too
    assert len(set(specs)) == len(specs)


def test_memory_is_a_budget() -> None:
    """int4 keeps a residual of 4 bytes per element, int8 nothing."""
    plan = plan_on(SLOW, Budget(memory_bytes=1000))
    assert plan.compress == "int8"
    int4 = next(one for one in plan.candidates if one.compress == "int4")
    assert int4.memory_bytes == 4 * LAYERS * 256 * 256
    assert not int4.allowed
    assert "allowed 0.0 MB" in int4.verdict


def test_the_noise_allows_more_than_the_fixed_limit() -> None:
    assert error_limit(None, "safe") == 0.05
    assert error_limit(0.9, "safe") == pytest.approx(0.09)  # a tenth of nine tenths
    assert error_limit(0.01, "safe") == 0.05
    assert error_limit(0.9, "fast") is None


def test_measured_errors_come_before_those_of_gaussian_numbers() -> None:
    bad = {tensor.fqn: 0.5 for tensor in model().specs}
    plan = plan_on(SLOW, profile=replace(model(), errors={"int4": bad}))
    assert plan.compress == "int8"


@settings(max_examples=30, deadline=None)
@given(
    st.floats(min_value=1e6, max_value=1e11),
    st.floats(min_value=0, max_value=5e-3),
    st.sampled_from(["exact", "safe", "fast"]),
)
def test_never_predicted_slower_than_dense(bits_per_s: float, latency_s: float, quality: str) -> None:
    plan = plan_on(Link(bits_per_s, latency_s), Budget(quality=quality, experimental=True))  # type: ignore[arg-type]
    assert plan.step_s <= plan.dense_s
    assert plan.step_s >= plan.floor_s
    allowed = [one for one in plan.candidates if one.allowed]
    assert plan.step_s <= 1.03 * min(one.step_s for one in allowed) + 1e-12


def test_the_same_numbers_give_the_same_plan() -> None:
    one, other = plan_on(SLOW), plan_on(SLOW)
    assert replace(one, date="") == replace(other, date="")


def test_json_round_trip(tmp_path: Path) -> None:
    plan = choose(model(), network_of_link(SLOW, 4), CODECS, CLUSTER, roofs=Roofs(1e11, 1e10), facts={"link": "slow"})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="version is None, expected 1"):
        Plan.load(tmp_path / "plan.json")


def test_explain_names_the_choice_and_every_reason() -> None:
    plan = plan_on(SLOW)
    text = plan.explain()
    assert text.startswith("int4, fuse=")
    for reason in plan.reasons:
        assert reason in text
    for one in plan.candidates:
        assert one.verdict in text
    assert "× the floor" in text


def test_shared_cores_make_a_step_longer() -> None:
    shared = Cluster(world_size=4, ranks_per_machine=4, cores=2)
    at_home = replace(model(), slowdown=2.0)  # measured where ranks share cores already
    network = network_of_link(SLOW, 4, cpu={"all_reduce": Curve(((1.0, 0.001),)), "all_gather": Curve(((1.0, 0.001),))})
    alone, crowded = (
        Pricer(profile, network, CODECS, cluster).price("dense", "auto")
        for profile, cluster in ((model(), CLUSTER), (at_home, shared))
    )
    assert crowded.step_s > alone.step_s
    assert Pricer(at_home, network, CODECS, shared).floor_s == pytest.approx(model().compute_s)
    assert Pricer(model(), network, CODECS, shared).floor_s == pytest.approx(2 * model().compute_s)


@pytest.mark.parametrize("fuse", ["auto", "none", "1MiB", "safusion", "optimal"])
def test_bytes_do_not_depend_on_the_fusion(fuse: str) -> None:
    pricer = Pricer(model(), network_of_link(SLOW, 4), CODECS, CLUSTER)
    price = pricer.price("int4", fuse)
    assert price.wire_bytes == pricer.price("int4", "auto").wire_bytes
    sent = sum(span.sent_bytes for span in price.simulated.spans if span.activity == "wire")
    flags = 3 * flag_elems(LAYERS + 1, 0, 4)
    assert sent == pytest.approx(price.wire_bytes + flags, rel=0.01, abs=150 * price.messages)


def _varied(host: Curve | None = None) -> Pricer:
    """22 matrices, every second one small, and a bias; selection is slow enough for small ones to stay dense."""
    sides = [(256, 256) if i % 2 else (64, 40) for i in range(22)]
    specs = [TensorSpec(f"t{i}", shape) for i, shape in enumerate(sides)] + [TensorSpec("bias", (256,))]
    tensors = tuple(TensorProfile(spec, 0.005 * (i + 1)) for i, spec in enumerate(specs))
    profile = ModelProfile(tensors=tensors, forward_s=0.03, backward_s=0.12)
    slow = codec(["all_gather"], 2e-9, 0.9)
    line = Curve(((1.0, 1e-3), (1e6, 2e-3)))
    codecs = {**CODECS, "topk(density=0.05)": replace(slow, stages={2: (line, line), 8: (line, line)})}
    return Pricer(profile, network_of_link(SLOW, 4), codecs, CLUSTER, host)


def test_every_fusion_plans_every_tensor_once() -> None:
    pricer = _varied(host=Curve(((1.0, 1e-3),)))
    for fuse in ("auto", "none", "1MiB", "safusion", "optimal", "ssfusion", "ssfusion+host"):
        plans = pricer.group_plans("topk(density=0.05)", fuse)
        assert sorted(name for plan in plans for name in plan.names) == sorted(t.fqn for t in pricer.profile.specs)
        assert plans[-1].names[-1] == "bias", "small tensors travel with the last group"


def test_ssfusion_is_priced_with_the_groups_that_it_makes() -> None:
    """Two planned groups of 20 and 2 tensors; each is a dense and a sparse message, the dense one first."""
    pricer = _varied()
    plans = pricer.group_plans("topk(density=0.05)", "ssfusion")
    assert [len(plan.names) for plan in plans] == [20, 3]
    assert all(plan.dense and plan.density is not None and plan.density < 0.05 for plan in plans)
    assert all(not plan.hosted for plan in plans)
    price = pricer.price("topk(density=0.05)", "ssfusion")
    groups = [span.group for span in price.simulated.spans if span.activity == "encode"]
    assert groups == [0, 1, 2, 3]
    dense_elems = 10 * 64 * 40
    first = next(span for span in price.simulated.spans if span.activity == "wire")
    assert first.sent_bytes == 2 * 3 * 4 * dense_elems // 4
    sent = sum(span.sent_bytes for span in price.simulated.spans if span.activity == "wire")
    assert sent == pytest.approx(price.wire_bytes, rel=0.02)
    assert price.wire_bytes < pricer.price("topk(density=0.05)", "auto").wire_bytes, "dense elements need no index"


def test_the_host_selects_where_it_is_fast() -> None:
    spec, slow, fast = "topk(density=0.05)", Curve(((1.0, 5.0),)), Curve(((1.0, 1e-4),))
    hosted = [
        [name for plan in _varied(host).group_plans(spec, "ssfusion+host") for name in plan.hosted]
        for host in (slow, fast)
    ]
    assert len(hosted[0]) < len(hosted[1]) == 11, "every sparse tensor"
    with pytest.raises(ConfigError, match="host_curve"):
        _varied().group_plans(spec, "ssfusion+host")
    encode_s = [
        sum(s.seconds for s in _varied(fast).price(spec, fuse).simulated.spans if s.activity == "encode")
        for fuse in ("ssfusion+host", "ssfusion")
    ]
    assert encode_s[0] < encode_s[1], "the device only waits for the host"


def test_a_fusion_that_does_not_suit_the_compressor_is_refused() -> None:
    with pytest.raises(ConfigError, match="no density"):
        _varied().group_plans("int4", "ssfusion")


def test_crowded_machines_get_fewer_messages() -> None:
    """Messages take processor time that four ranks on two cores do not have."""
    cpu = dict.fromkeys(("all_reduce", "all_gather", "all_to_all"), Curve(((1.0, 0.01),)))
    profile = replace(model(), slowdown=2.0)
    crowded = Pricer(
        profile, network_of_link(FAST, 4, cpu=cpu), CODECS, Cluster(world_size=4, ranks_per_machine=4, cores=2)
    )
    alone = Pricer(model(), network_of_link(FAST, 4, cpu=cpu), CODECS, CLUSTER)
    for fuse in ("safusion", "optimal"):
        assert len(crowded.group_plans("int4", fuse)) < len(alone.group_plans("int4", fuse))


def test_flags_are_piggybacked_where_copying_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``comm.merge`` decides, by what is reduced, not by what its ring sends."""
    pricer = Pricer(model(), network_of_link(FAST, 4), CODECS, CLUSTER)
    reduced_bytes = 4 * model().elems
    assert pricer.price("dense", "64MiB").messages == 1
    monkeypatch.setattr("thinwire.comm.piggyback.MOST_COPIED_BYTES", reduced_bytes)
    assert pricer.price("dense", "64MiB").messages == 1
    monkeypatch.setattr("thinwire.comm.piggyback.MOST_COPIED_BYTES", reduced_bytes - 1)
    assert pricer.price("dense", "64MiB").messages == 2


@pytest.mark.parametrize(
    ("step_s", "messages", "chosen"),
    [
        (1.04, 1, "64MiB"),
        (1.06, 1, "auto"),
        (0.96, 8, "auto"),
        (0.94, 8, "64MiB"),
        (0.94, 12, "auto"),
    ],
)
def test_a_fusion_of_more_messages_must_be_clearly_faster(step_s: float, messages: int, chosen: str) -> None:
    """By a margin, and by one more start-up of each, which take 0.01 s here; the other fusion has four messages."""
    real = Pricer(model(), network_of_link(FAST, 4), CODECS, CLUSTER).price("dense", "auto")
    prices = {
        "auto": replace(real, fuse="auto", step_s=1.0, messages=4, startup_s=0.04),
        "64MiB": replace(real, fuse="64MiB", step_s=step_s, messages=messages, startup_s=0.01 * messages),
    }
    pricer = SimpleNamespace(measured=model(), price=lambda _, fuse: prices[fuse])
    assert best_fusion(pricer, "dense", ("auto", "64MiB")).fuse == chosen  # type: ignore[arg-type]
    cheapest = min(prices.values(), key=lambda one: one.step_s + one.startup_s)
    assert best_fusion(pricer, "int4", ("auto", "64MiB")).fuse == cheapest.fuse, "only dense has a margin"  # type: ignore[arg-type]


def test_start_ups_are_those_of_all_messages() -> None:
    link = Link(1e9, 1e-3)
    few, many = (
        Pricer(model(), network_of_link(link, 4), CODECS, CLUSTER).price("dense", f) for f in ("64MiB", "none")
    )
    assert few.messages < many.messages
    assert few.startup_s / few.messages == pytest.approx(many.startup_s / many.messages)
    assert few.startup_s >= 6e-3, "a ring of four has six hops"


def test_mistakes_are_messages() -> None:
    network = network_of_link(SLOW, 4)
    with pytest.raises(ConfigError, match="quality"):
        Budget(quality="best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'dense'"):
        Pricer(model(), network, {}, CLUSTER)
    with pytest.raises(ConfigError, match="network_at"):
        Pricer(model(), network, CODECS, Cluster(world_size=8))
    with pytest.raises(ConfigError, match="not measured"):
        Pricer(model(), network, CODECS, CLUSTER).price("sign", "auto")


def test_a_sweep_goes_from_compressed_to_dense() -> None:
    rows = sweep_rates(model(), network_of_link(SLOW, 4), CODECS, CLUSTER, 1e-4)
    winners = [row["winner"] for row in rows]
    assert winners[0] == "int4"
    assert winners[-1] == "dense"
    dense_s = [row["step_s"]["dense"] for row in rows]
    assert dense_s == sorted(dense_s, reverse=True)


def test_the_roofline_turns_at_the_batch_that_balances_it() -> None:
    line = roofline(model(), Roofs(1e12, 1e12), wire_bytes=1e6, network_bytes_per_s=1e6)
    assert line.binding == "network"
    assert line.attainable == pytest.approx(2e9)  # one step per second
    larger = replace(model(), flops=2e9 * line.turning_batch / 8, forward_s=0.03 * line.turning_batch / 8)
    larger = replace(larger, backward_s=0.07 * line.turning_batch / 8)
    balanced = roofline(larger, Roofs(1e12, 1e12), wire_bytes=1e6, network_bytes_per_s=1e6)
    assert balanced.network == pytest.approx(balanced.achieved)
    faster = roofline(model(), Roofs(1e12, 1e12), 1e6, line.turning_bytes_per_s)
    assert faster.network == pytest.approx(faster.achieved)
    assert roofline(model(), Roofs(1.0, 1e12), 1e6, 1e6).binding == "compute"
    assert roofline(model(), Roofs(1e12, 1.0), 1e6, 1e6).binding == "memory"
