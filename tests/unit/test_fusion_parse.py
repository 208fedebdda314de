"""From the text of ``fuse=`` to groups."""

from __future__ import annotations

import pytest

from thinwire.core import ConfigError, TensorSpec
from thinwire.fusion import (
    Curve,
    Profile,
    TensorProfile,
    fixed_groups,
    groups_of_counts,
    optimal_groups,
    parse_fusion,
    safusion_groups,
    tensor_counts,
)

TENSORS = tuple(TensorSpec(f"t{index}", (1000,)) for index in range(6))
PROFILE = Profile(
    tuple(TensorProfile(tensor, 0.001 * (index + 1)) for index, tensor in enumerate(TENSORS)),
    encode=Curve(((0.0, 1e-5),)),
    message=Curve(((0.0, 2e-3), (4000.0, 3e-3))),
)


@pytest.mark.parametrize(
    ("text", "counts"), [("none", [1] * 6), ("8000", [2, 2, 2]), (" 8 kB", [2, 2, 2]), ("12KiB", [3, 3]), ("auto", [6])]
)
def test_planners_without_a_profile(text: str, counts: list[int]) -> None:
    planner = parse_fusion(text)
    assert not planner.needs_profile
    assert tensor_counts(planner(TENSORS)) == tensor_counts(planner.plan(PROFILE)) == counts


def test_planners_with_a_profile_start_with_the_default_cap() -> None:
    planner = parse_fusion("optimal")
    assert planner.needs_profile
    assert planner(TENSORS) == parse_fusion("auto")(TENSORS)
    assert planner.plan(PROFILE) == optimal_groups(PROFILE) != planner(TENSORS)
    assert parse_fusion("safusion").plan(PROFILE) == safusion_groups(PROFILE)
    assert parse_fusion("ssfusion").plan(PROFILE) == [TENSORS]


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
