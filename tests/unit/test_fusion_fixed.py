"""Fusion by a byte cap."""

from __future__ import annotations

import pytest

from thinwire.core import ConfigError, TensorSpec
from thinwire.fusion import fixed_groups, parse_fusion

TENSORS = [TensorSpec(f"t{i}", (elems,)) for i, elems in enumerate((10, 10, 30, 5, 5, 5))]


def _names(groups: list[tuple[TensorSpec, ...]]) -> list[list[str]]:
    return [[tensor.fqn for tensor in group] for group in groups]


def test_groups_close_before_the_cap() -> None:
    assert _names(fixed_groups(TENSORS, 80)) == [["t0", "t1"], ["t2"], ["t3", "t4", "t5"]]


def test_a_tensor_above_the_cap_is_alone() -> None:
    assert _names(fixed_groups(TENSORS, 0)) == [[tensor.fqn] for tensor in TENSORS]


def test_nothing_gives_nothing() -> None:
    assert fixed_groups([], 100) == []


@pytest.mark.parametrize(
    ("text", "groups"),
    [("none", 6), ("auto", 1), ("80", 3), ("0.04 kB", 5), ("1KiB", 1), ("1 mib", 1), (" 80 ", 3)],
)
def test_settings_are_read(text: str, groups: int) -> None:
    assert len(parse_fusion(text)(TENSORS)) == groups


@pytest.mark.parametrize("text", ["", "much", "-1", "2 parsecs", "1e3", "2MiBs"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse_fusion(text)
