"""Compressors driven alone: what they ask for, how long they take, how much they lose."""

from __future__ import annotations

import pytest
import torch

import thinwire.api  # noqa: F401  (fills the registry)
from thinwire.core import TensorSpec, available
from thinwire.core.registry import compressor_class
from thinwire.core.schema import from_json, to_json
from thinwire.fusion import Curve
from thinwire.plan import CodecCost, measure_codec, relative_error
from thinwire.plan.messages import Asked

SMALL = (40, 64)
ALL = [str(compressor_class(one.name).examples()[0]) for one in available() if not one.wrapper]


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        ("dense", [["all_reduce"]]),
        ("int4", [["all_to_all"], ["all_gather"]]),
        ("topk(density=0.01)", [["all_gather"]]),
        ("powersgd(rank=2)", [["all_reduce"], ["all_reduce"]]),
    ],
)
def test_rounds_and_kinds(spec: str, kinds: list[list[str]]) -> None:
    cost = measure_codec(spec, SMALL, repeats=1)
    assert [[asked.kind for asked in one] for one in cost.rounds] == kinds
    assert sum(asked.share for one in cost.rounds for asked in one) == pytest.approx(1.0)
    assert all(len(stages) == len(kinds) + 1 for stages in cost.stages.values())


@pytest.mark.parametrize("spec", ALL)
def test_every_registered_compressor_can_be_measured(spec: str) -> None:
    cost = measure_codec(spec, SMALL, repeats=1)
    assert all(seconds >= 0 for seconds in cost.stage_s(1e6, 16))
    assert 0 <= cost.relative_error < 4
    assert from_json(CodecCost, to_json(cost), what="cost", remedy="") == cost


def test_costs_of_an_earlier_release_are_read() -> None:
    values = {
        "rounds": [[["all_reduce", 1.0]]],
        "stages": {"2": [[[1, 2]]] * 2, "8": [[[1, 3]]] * 2},
        "relative_error": 0.5,
    }
    cost = from_json(CodecCost, values, what="cost", remedy="")
    assert cost.rounds == ((Asked("all_reduce", 1.0),),)
    assert cost.rounds == measure_codec("dense", SMALL, repeats=1).rounds, "they are merged with those of today"


def test_stages_grow_linearly_with_the_ranks() -> None:
    flat, steep = Curve(((1.0, 1.0),)), Curve(((1.0, 4.0),))
    cost = CodecCost(((Asked("all_gather", 1.0),),), {2: (flat, flat), 8: (flat, steep)}, 0.0)
    assert cost.stage_s(1.0, 2) == (1.0, 1.0)
    assert cost.stage_s(1.0, 8) == (1.0, 4.0)
    assert cost.stage_s(1.0, 14) == (1.0, 7.0)
    assert cost.stage_s(1.0, 1) == (1.0, 1.0)


def test_noise_in_the_measurement_never_makes_more_ranks_cheaper() -> None:
    low, high = Curve(((1.0, 2.0),)), Curve(((1.0, 1.0),))
    cost = CodecCost(((Asked("all_gather", 1.0),),), {2: (low, low), 8: (high, high)}, 0.0)
    assert cost.stage_s(1.0, 1024) == (2.0, 2.0)


def test_encoding_does_not_depend_on_the_ranks() -> None:
    low, high = Curve(((1.0, 1.0),)), Curve(((1.0, 9.0),))
    assert CodecCost((), {2: (low,), 8: (high,)}, 0.0).stage_s(1.0, 1024) == (1.0,)


def test_error_of_topk_is_what_it_leaves() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    kept = x.abs().topk(40).values.square().sum()
    expected = 1 - float(kept / x.square().sum())
    found = relative_error("topk(density=0.01)", x, TensorSpec("w", (64, 64)))
    assert found == pytest.approx(expected, rel=1e-4)


def test_small_tensors_are_dense_and_lose_nothing() -> None:
    assert relative_error("topk(density=0.01)", torch.randn(64), TensorSpec("bias", (64,))) == 0.0
    assert relative_error("int4", torch.zeros(64, 64), TensorSpec("w", (64, 64))) == 0.0


def test_formats_are_ordered_by_their_error() -> None:
    x, tensor = torch.randn(128, 128, generator=torch.Generator().manual_seed(2)), TensorSpec("w", (128, 128))
    errors = [relative_error(spec, x, tensor) for spec in ("dense", "bf16", "int8", "int4", "topk(density=0.01)")]
    assert errors == sorted(errors)
    assert errors[1] < 1e-5 < errors[2]  # what "exact" tells apart
