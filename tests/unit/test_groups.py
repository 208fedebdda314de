"""From tensors to units: routing, feedback, fingerprints."""

from __future__ import annotations

import pytest
import torch

from thinwire.core import ConfigError, TensorSpec, make
from thinwire.engine.groups import fingerprint, make_group
from thinwire.fusion.prepare import prepare

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
