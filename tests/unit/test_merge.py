"""Merging: one message per kind and round, and every exchange gets exactly its own part back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.comm import simulate
from thinwire.comm.merge import merge
from thinwire.comm.piggyback import Kind, SmallSum, carrier, flag_elems, riders
from thinwire.core import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Exchanged, Request

Ask = Callable[[int, int], Request]  # rank, length


def _bytes(rank: int, length: int) -> Tensor:
    return ((torch.arange(length) + 7 * rank) % 256).to(torch.uint8)


KINDS: dict[str, Ask] = {
    "mean": lambda rank, length: AllReduce(torch.arange(length, dtype=torch.float32) + rank),
    "max": lambda rank, length: AllReduce(torch.arange(length, dtype=torch.float32) + rank, "max"),
    "half": lambda rank, length: AllReduce(torch.full((length,), float(rank), dtype=torch.float16), "sum"),
    "matrix": lambda rank, length: AllReduce(torch.full((2, length), float(rank))),
    "gather": lambda rank, length: AllGather(_bytes(rank, length)),
    "varying": lambda rank, length: AllGather(_bytes(rank, length + rank), varying=True),
    "scatter": lambda rank, length: AllToAll(torch.stack([_bytes(rank + 10 * to, length) for to in range(3)])),
    "broadcast": lambda rank, length: Broadcast(torch.full((length,), rank), source=1),
}
asks = st.one_of(st.sampled_from(sorted(KINDS)), st.lists(st.sampled_from(sorted(KINDS)), max_size=3).map(tuple))
plans = st.lists(st.lists(asks, max_size=3), min_size=1, max_size=5)


def _exchange(plan: list[str | tuple[str, ...]], rank: int, number: int) -> Exchange:
    """Asks round by round and returns all it got as one list of tensors."""
    got: list[Tensor] = []
    for round_index, ask in enumerate(plan):
        length = 1 + (3 * number + 5 * round_index) % 11
        if isinstance(ask, tuple):
            replies = yield tuple(KINDS[kind](rank, length + i) for i, kind in enumerate(ask))
            assert isinstance(replies, tuple)
            assert len(replies) == len(ask)
        else:
            replies = ((yield KINDS[ask](rank, length)),)
        for reply in replies:
            got.extend(reply if not isinstance(reply, Tensor) else [reply])
    return Exchanged(torch.empty(0), None, {str(i): tensor.clone() for i, tensor in enumerate(got)})


@given(plans)
def test_merged_equals_alone(plan: list[list[str | tuple[str, ...]]]) -> None:
    world_size = 3
    alone = [simulate([_exchange(one, rank, i) for rank in range(world_size)]) for i, one in enumerate(plan)]
    together = simulate([merge([_exchange(one, rank, i) for i, one in enumerate(plan)]) for rank in range(world_size)])
    for number, expected in enumerate(alone):
        for rank in range(world_size):
            _assert_same(together[rank][number].state, expected[rank].state)


def _assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """A scattered reply may come as rows or as one matrix: the same rows in the same order."""
    flat_got, flat_expected = (
        [row for tensor in state.values() for row in (tensor if tensor.dim() > 1 else [tensor])]
        for state in (got, expected)
    )
    assert [one.tolist() for one in flat_got] == [one.tolist() for one in flat_expected]


def test_merged_parts_can_be_viewed_as_wider_dtypes() -> None:
    """Odd lengths before a part must not move it off its alignment."""
    wide = torch.tensor([1.5, 2.5]).view(torch.uint8)

    def odd() -> Exchange:
        yield AllGather(torch.zeros(3, dtype=torch.uint8))
        return Exchanged(torch.empty(0), None, {})

    def aligned() -> Exchange:
        (message,) = yield AllGather(wide)
        return Exchanged(message.view(torch.float32), None, {})

    (results,) = simulate([merge([odd(), aligned()])])
    assert results[1].mean.tolist() == [1.5, 2.5]


@pytest.mark.parametrize("kinds", [(), *((kind,) for kind in KINDS), ("mean", "gather"), ("scatter", "max")])
def test_flags_of_all_ranks_are_piggybacked(kinds: tuple[str, ...]) -> None:
    def agree(rank: int) -> Generator[SmallSum, Tensor, list[int]]:
        values = torch.tensor([rank == 0, 15 * (rank == 2), False, True], dtype=torch.uint8)
        return (yield SmallSum(values, 3)).tolist()

    def ask(kind: str, rank: int) -> Generator[Request, Any, Any]:
        return (yield KINDS[kind](rank, 5))

    sent: list[list[str]] = []

    def noted(exchange: Generator[tuple[Request, ...], Any, Any]) -> Generator[tuple[Request, ...], Any, Any]:
        reply = None
        while True:
            try:
                requests = exchange.send(reply)
            except StopIteration as stop:
                return stop.value
            sent.append([type(request).__name__ for request in requests])
            reply = yield requests

    results = simulate([noted(merge([*(ask(kind, rank) for kind in kinds), agree(rank)])) for rank in range(3)])
    for got in results:
        assert got[-1] == [1, 15, 0, 3]
    extra = 0 if {"mean", "half", "matrix", "gather", "scatter"} & set(kinds) else 1
    assert [len(requests) for requests in sent] == [len(kinds) + extra] * 3


def _reduced_with_flags(x: Tensor, headroom: Tensor | None) -> Sequence[Request]:
    def dense() -> Generator[Request, Any, Any]:
        return (yield AllReduce(x))

    def agree() -> Generator[SmallSum, Any, Any]:
        return (yield SmallSum(torch.tensor([1, 0], dtype=torch.uint8), 1, headroom))

    return next(merge([dense(), agree()]))


def test_flags_behind_a_tensor_travel_with_it_without_a_copy() -> None:
    buffer = torch.arange(8.0)
    (request,) = _reduced_with_flags(buffer[:5], buffer[5:])
    assert isinstance(request, AllReduce)
    assert request.tensor.data_ptr() == buffer.data_ptr()
    assert request.tensor.tolist() == [0, 1, 2, 3, 4, 1, 0]


@pytest.mark.parametrize("headroom", [None, torch.zeros(3)])
def test_what_travels_does_not_depend_on_where_memory_lies(headroom: Tensor | None) -> None:
    (request,) = _reduced_with_flags(torch.arange(5.0), headroom)
    assert isinstance(request, AllReduce)
    assert request.tensor.tolist() == [0, 1, 2, 3, 4, 1, 0]


def test_flags_do_not_make_very_large_tensors_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.comm.piggyback.MOST_COPIED_BYTES", 400)
    kinds = [[type(request) for request in _reduced_with_flags(torch.zeros(n), None)] for n in (100, 101)]
    assert kinds == [[AllReduce], [AllReduce, AllGather]]


def _summed_beside(scatter: Tensor, x: Tensor, op: str) -> Generator[tuple[Request, ...], Any, list[Any]]:
    def ask(request: Request) -> Generator[Request, Any, Any]:
        return (yield request)

    return merge([ask(AllToAll(scatter)), ask(AllReduce(x, op))])  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_sums_are_piggybacked_on_an_all_to_all(op: str, dtype: torch.dtype) -> None:
    rows = torch.arange(15, dtype=torch.uint8).view(3, 5)
    x = [torch.tensor([[1.0, 2.0], [4.0, 8.0 + rank]], dtype=dtype) for rank in range(3)]
    assert [type(request) for request in next(_summed_beside(rows, x[0], op))] == [AllToAll]
    for rank, (scattered, total) in enumerate(simulate([_summed_beside(rows, one.clone(), op) for one in x])):
        assert [row.tolist() for row in scattered] == [rows[rank].tolist()] * 3
        expected = x[0] + x[1] + x[2]
        assert torch.equal(total, expected / 3 if op == "mean" else expected)


@pytest.mark.parametrize(("op", "numel"), [("max", 2), ("sum", 16 << 10)])
def test_other_reductions_and_long_ones_are_not_piggybacked(op: str, numel: int) -> None:
    requests = next(_summed_beside(torch.zeros(3, 5, dtype=torch.uint8), torch.zeros(numel), op))
    assert [type(request) for request in requests] == [AllToAll, AllReduce]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 100, 129, 255, 256])
def test_small_sums_are_exact_in_any_float(dtype: torch.dtype, op: str, world_size: int) -> None:
    """A value of one rank arrives as it is; a flag that every rank has set, or one alone, is not lost."""
    ranks = torch.arange(world_size).view(-1, 1)
    of_one_rank = torch.arange(16) * (ranks == torch.arange(16) % world_size)
    flags = torch.cat([torch.ones(world_size, 1), ranks == world_size - 1, torch.zeros(world_size, 1)], dim=1)
    values = torch.cat([of_one_rank, flags], dim=1).to(torch.uint8)

    def dense(rank: int) -> Generator[Request, Any, Any]:
        return (yield AllReduce(torch.full((3,), float(rank), dtype=dtype), op))  # type: ignore[arg-type]

    def agree(rank: int) -> Generator[SmallSum, Any, Any]:
        return (yield SmallSum(values[rank], world_size))

    results = simulate([merge([dense(rank), agree(rank)]) for rank in range(world_size)])
    for _, got in (results[0], results[-1]):
        assert got.dtype is torch.int64
        assert got[:16].tolist() == list(range(16))
        assert got[16] > 0
        assert got[17:].tolist() == [1, 0]


def test_small_sums_of_gathered_rows_do_not_wrap() -> None:
    def agree() -> Generator[SmallSum, Any, Any]:
        return (yield SmallSum(torch.tensor([255], dtype=torch.uint8), 4))

    assert [got.tolist() for (got,) in simulate([merge([agree()]) for _ in range(4)])] == [[1020]] * 4


MIB = 1 << 20


@pytest.mark.parametrize(
    ("kinds", "sizes", "expected"),
    [
        ([], [], "all_gather"),
        ([None], [8], "all_gather"),
        (["all_reduce"], [64 * MIB], "all_reduce"),
        (["all_reduce", "all_reduce"], [64 * MIB, 1], "all_gather"),
        (["all_reduce", "all_to_all"], [8, 8], "all_to_all"),
        (["all_reduce", "all_to_all", "all_gather"], [8, 8, 8], "all_gather"),
    ],
)
def test_carrier_of_the_flags(kinds: list[Kind | None], sizes: list[int], expected: str) -> None:
    assert carrier(kinds, sizes) == expected


@pytest.mark.parametrize(
    ("kinds", "sizes", "expected"),
    [
        (["all_reduce", "all_gather"], [8, 8], []),
        (["all_reduce", "all_to_all", "all_reduce"], [8, MIB, 8], [0, 2]),
        (["all_reduce", "all_to_all"], [32 << 10, 8], [0]),
        (["all_reduce", "all_to_all"], [(32 << 10) + 4, 8], []),
        (["all_reduce", "all_to_all", "all_reduce"], [32 << 10, 8, 4], []),
        ([None, "all_to_all"], [8, 8], []),
    ],
)
def test_sums_that_ride_with_an_all_to_all(kinds: list[Kind | None], sizes: list[int], expected: list[int]) -> None:
    assert riders(kinds, sizes, world_size=4) == expected


def test_number_of_flags() -> None:
    assert flag_elems(tensors=10, scalars=0, world_size=4) == 1 + 10 + 64
    assert flag_elems(tensors=10, scalars=2, world_size=4) == 1 + 10 + 64 + 8 * 2 * 4
