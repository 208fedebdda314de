"""From tensors to units: routing, feedback, fingerprints."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from thinwire.core import CheckpointError, ConfigError, TensorSpec, make
from thinwire.core.schema import to_json
from thinwire.fusion import parse_fusion
from thinwire.fusion.groups import (
    GroupPlan,
    density_of,
    make_group,
    make_groups,
    plan_groups,
    read_plans,
    with_density,
)
from thinwire.fusion.prepare import prepare
from thinwire.wire.attach import fingerprint

MATRIX, SMALL, BIAS, CONV = (
    TensorSpec(name, shape) for name, shape in (("m", (64, 64)), ("s", (4, 4)), ("b", (4096,)), ("c", (64, 32, 3, 3)))
)


@pytest.mark.parametrize(
    ("spec", "prepared"),
    [
        ("topk", "route | ef | topk(density=0.01)"),
        ("noef | topk", "route | noef | topk(density=0.01)"),
        ("ef(decay=0.5) | topk", "route | ef(decay=0.5) | topk(density=0.01)"),
        ("momentum | topk", "route | momentum | ef | topk(density=0.01)"),
        ("route(min_elems=4) | topk", "route(min_elems=4) | ef | topk(density=0.01)"),
        ("momentum | route | topk", "momentum | route | ef | topk(density=0.01)"),
        ("dense", "route | dense"),
    ],
)
def test_prepare_adds_what_is_missing(spec: str, prepared: str) -> None:
    assert str(prepare(spec)) == prepared


def test_int4_compresses_what_is_large() -> None:
    compressor = prepare("int4").route(CONV)
    group = make_group([CONV], prepare("int4"))
    assert compressor.wire_bytes(group.units[0].spec, 4) < make("dense").wire_bytes(group.units[0].spec, 4) / 4


def test_small_and_flat_tensors_go_dense_together() -> None:
    group = make_group([MATRIX, BIAS, CONV, SMALL], prepare("topk"))
    assert [(str(unit.compressor), [t.fqn for t in unit.spec.tensors]) for unit in group.units] == [
        ("ef | topk(density=0.01)", ["m", "c"]),
        ("dense", ["b", "s"]),
    ]
    assert sorted(t.fqn for t in group.tensors) == ["b", "c", "m", "s"]


def test_routing_goes_through_wrappers() -> None:
    routed = prepare("momentum | route | topk")
    assert str(routed.route(BIAS)) == "momentum | dense"
    assert str(routed.route(MATRIX)) == "momentum | ef | topk(density=0.01)"


def test_fingerprints_differ_with_model_and_settings() -> None:
    base = fingerprint([MATRIX, BIAS], "topk", "auto")
    others = [
        fingerprint([BIAS, MATRIX], "topk", "auto"),
        fingerprint([MATRIX], "topk", "auto"),
        fingerprint([TensorSpec("m", (64, 64), torch.bfloat16), BIAS], "topk", "auto"),
        fingerprint([TensorSpec("n", (64, 64)), BIAS], "topk", "auto"),
        fingerprint([MATRIX, BIAS], "topk", "none"),
        fingerprint([MATRIX, BIAS], "int4", "auto"),
        fingerprint([MATRIX, BIAS], "topkauto", ""),
    ]
    assert base == fingerprint([MATRIX, BIAS], "topk", "auto")
    assert len({base, *others}) == 1 + len(others)
    assert 0 <= base < 2**64


def test_unknown_specs_are_refused() -> None:
    with pytest.raises(ConfigError, match="Available"):
        prepare("zip")


def _described(plans: list[GroupPlan], spec: str) -> list[list[tuple[str, list[str]]]]:
    tensors = {tensor.fqn: tensor for tensor in (MATRIX, SMALL, BIAS, CONV)}
    groups = make_groups(plans, tensors, prepare(spec))
    return [[(str(unit.compressor), [t.fqn for t in unit.spec.tensors]) for unit in group.units] for group in groups]


def test_a_dense_part_is_a_group_of_its_own_before_the_rest() -> None:
    plans = [GroupPlan(("c", "m"), dense=("m",), density=0.25), GroupPlan(("b", "s"))]
    assert _described(plans, "topk") == [
        [("ef | dense", ["m"])],
        [("ef | topk(density=0.25)", ["c"])],
        [("dense", ["b", "s"])],
    ]


def test_hosted_tensors_are_units_of_their_own() -> None:
    plans = [GroupPlan(("c", "m", "b"), hosted=("m",))]
    topk = "ef | topk(density=0.01)"
    assert _described(plans, "topk") == [[(topk, ["c"]), (f"host | {topk}", ["m"]), ("dense", ["b"])]]


def test_small_tensors_travel_with_the_last_group() -> None:
    plans = plan_groups(parse_fusion("none"), [BIAS, MATRIX, SMALL, CONV], prepare("topk"), 4)
    assert [plan.names for plan in plans] == [("m",), ("c", "b", "s")]


def test_where_all_tensors_are_dense_none_is_small() -> None:
    plans = plan_groups(parse_fusion("none"), [BIAS, MATRIX], prepare("dense"), 4)
    assert [plan.names for plan in plans] == [("b",), ("m",)]


def test_densities_are_found_and_set_inside_wrappers() -> None:
    compressor = prepare("momentum | topk(density=0.05)")
    assert density_of(compressor) == 0.05
    assert density_of(with_density(compressor, 0.5)) == 0.5
    assert density_of(prepare("int4")) is None


def test_plans_survive_json() -> None:
    plans = [GroupPlan(("c", "m"), dense=("m",), density=0.25, hosted=("c",)), GroupPlan(("b",))]
    assert read_plans(json.loads(json.dumps(to_json(plans))), "bcm") == plans


def test_plans_from_before_host_offload_are_read() -> None:
    assert read_plans([{"names": ["c"], "dense": [], "density": None}], "c") == [GroupPlan(("c",))]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"names": ["c"]}, "fusion is .*expected a list"),
        (["c"], r"fusion\[0\] is 'c'"),
        ([{"dense": []}], r"fusion\[0\].names is missing"),
        ([{"names": "c"}], r"fusion\[0\].*names"),
        ([{"names": [1]}], r"fusion\[0\].*names"),
        ([{"names": ["c"], "dense": 3}], r"fusion\[0\].*dense"),
        ([{"names": ["c"], "dense": ["m"]}], r"fusion\[0\].*dense"),
        ([{"names": ["c"], "hosted": [None]}], r"fusion\[0\].*hosted"),
        ([{"names": ["c"], "density": "a lot"}], r"fusion\[0\].*density"),
        ([{"names": ["c"], "density": float("nan")}], r"fusion\[0\].*density"),
        ([{"names": ["c"], "density": 0}], r"fusion\[0\].*density"),
        ([{"names": ["c"]}, {"names": ["c"]}], "other parameters"),
        ([{"names": ["m"]}], "other parameters"),
    ],
)
def test_broken_plans_are_refused_by_field(values: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_plans(values, ["c"])
