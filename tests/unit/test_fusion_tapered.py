"""The default groups: every tensor once, in order, small at the end."""

from hypothesis import given
from hypothesis import strategies as st

from thinwire.core import TensorSpec
from thinwire.fusion import tapered_groups
from thinwire.fusion.tapered import FULL_GROUPS


def tensors_of(sizes: list[int]) -> list[TensorSpec]:
    return [TensorSpec(f"t{index}", (size,)) for index, size in enumerate(sizes)]


@given(sizes=st.lists(st.integers(0, 2000), max_size=60), last_bytes=st.integers(1, 3000))
def test_every_tensor_once_and_in_order(sizes: list[int], last_bytes: int) -> None:
    tensors = tensors_of(sizes)
    groups = tapered_groups(tensors, last_bytes=last_bytes, cap_bytes=8 * last_bytes)
    assert [tensor for group in groups for tensor in group] == tensors
    cap_bytes = max(8 * last_bytes, sum(4 * size for size in sizes) // FULL_GROUPS)
    for distance, group in enumerate(reversed(groups)):
        limit_bytes = min(2**distance * last_bytes, cap_bytes)
        if 4 * sum(t.numel for t in group) > limit_bytes:
            assert 8 * sum(t.numel for t in group[1:]) < limit_bytes, (
                "only a group that is not half full may grow so far"
            )
        elif distance < len(groups) - 1:
            assert 8 * sum(t.numel for t in group) >= limit_bytes, "only the first may be small"


def test_sizes_double_towards_the_front() -> None:
    groups = tapered_groups(tensors_of([256] * 60), last_bytes=4 * 1024, cap_bytes=1 << 20)
    assert [len(group) for group in groups] == [32, 16, 8, 4]


def test_groups_of_which_little_is_sent_may_be_larger() -> None:
    tensors = tensors_of([1 << 18] * 20)  # 20 MiB
    sizes = {share: [len(group) for group in tapered_groups(tensors, share)] for share in (1.0, 1 / 7.5, 0.02, 0.0)}
    assert sizes[1.0] == sizes[1 / 7.5] == [2, 4, 4, 4, 4, 2]
    assert sizes[0.02] == sizes[0.0] == [6, 8, 4, 2]


def test_a_large_tensor_takes_what_little_there_is_along() -> None:
    groups = tapered_groups(tensors_of([10, 100_000, 10]), last_bytes=100)
    assert [[t.numel for t in group] for group in groups] == [[10], [100_000, 10]]
    groups = tapered_groups(tensors_of([20, 100_000, 20]), last_bytes=100)
    assert [[t.numel for t in group] for group in groups] == [[20], [100_000], [20]]


def test_the_groups_of_a_large_model_are_large_instead_of_many() -> None:
    groups = tapered_groups(tensors_of([1 << 18] * 1000))
    assert 8 <= len(groups) <= 16
    assert max(len(group) for group in groups) == 125
