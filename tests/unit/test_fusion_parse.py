"""From the text of ``fuse=`` to groups."""

from __future__ import annotations

import pytest

from sim.fusion_models import case
from thinwire.core import ConfigError
from thinwire.fusion import (
    Curve,
    Groups,
    fixed_groups,
    groups_of_counts,
    optimal_groups,
    parse_fusion,
    safusion_groups,
)
from thinwire.fusion.prepare import prepare

CASE = case(
    [1000] * 6, [0.001 * (i + 1) for i in range(6)], Curve(((0.0, 1e-5),)), Curve(((0.0, 2e-3), (4000.0, 3e-3)))
)
TENSORS, ASKED = CASE.profile.specs, (CASE.profile, CASE.costs)


def tensor_counts(groups: Groups) -> list[int]:
    return [len(group) for group in groups]


@pytest.mark.parametrize(
    ("text", "counts"), [("none", [1] * 6), ("8000", [2, 2, 2]), (" 8 kB", [2, 2, 2]), ("12KiB", [3, 3]), ("auto", [6])]
)
def test_planners_without_a_profile(text: str, counts: list[int]) -> None:
    planner = parse_fusion(text)
    assert not planner.needs_profile
    assert tensor_counts(planner(TENSORS)) == tensor_counts(planner.plan(*ASKED)) == counts


def test_planners_with_a_profile_start_with_the_default_cap() -> None:
    planner = parse_fusion("optimal")
    assert planner.needs_profile
    assert planner(TENSORS) == parse_fusion("auto")(TENSORS)
    assert planner.plan(*ASKED) == optimal_groups(*ASKED) != planner(TENSORS)
    assert parse_fusion("safusion").plan(*ASKED) == safusion_groups(*ASKED)
    assert parse_fusion("ssfusion").plan(*ASKED) == [TENSORS]


@pytest.mark.parametrize("text", ["", "2GiB/s", "-3", "sefusion", "None"])
def test_anything_else_is_refused_with_the_list_of_planners(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"'auto', 'none', 'safusion', 'ssfusion', 'ssfusion\+host', 'optimal' or a size such as '2MiB'",
    ):
        parse_fusion(text)


@pytest.mark.parametrize("counts", [[], [2, 2], [6, 0], [7], [7, -1]])
def test_counts_of_another_model_are_refused(counts: list[int]) -> None:
    with pytest.raises(ConfigError, match="another model"):
        groups_of_counts(TENSORS, counts)


def test_counts_describe_groups() -> None:
    groups = fixed_groups(TENSORS, 16_000)
    assert tensor_counts(groups) == [4, 2]
    assert groups_of_counts(TENSORS, [4, 2]) == groups


@pytest.mark.parametrize("fuse", ["ssfusion", "ssfusion+host"])
@pytest.mark.parametrize(
    ("spec", "message"), [("int4", "no density"), ("topk(density=warmup(0.25, 0.01, steps=20))", "one that changes")]
)
def test_splitting_needs_a_constant_density(fuse: str, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_fusion(fuse).check(prepare(spec))
    parse_fusion(fuse).check(prepare("topk(density=0.05)"))
    parse_fusion("safusion").check(prepare(spec))
