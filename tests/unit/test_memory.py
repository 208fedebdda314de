"""The pool: memory is used again exactly when nothing refers to it any more."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.core import memory
from thinwire.core.memory import IDLE_STEPS, SMALL_BYTES, Pool, recycling

ELEMS = SMALL_BYTES  # as fp32 four times what counts as small


def test_freed_memory_comes_back_and_used_memory_does_not() -> None:
    pool = Pool()
    with recycling(pool):
        first = memory.empty(ELEMS)
        address = first.data_ptr()
        second = memory.empty(ELEMS)
        assert second.data_ptr() != address
        del first
        assert memory.empty(ELEMS).data_ptr() == address
    assert pool.made == 2


def test_a_view_keeps_its_memory() -> None:
    pool = Pool()
    with recycling(pool):
        whole = memory.empty((4, ELEMS), torch.float32)
        row = whole[1].view(torch.int32)
        row.fill_(7)
        del whole
        for _ in range(3):
            memory.empty((4, ELEMS)).fill_(1.0)
        assert bool((row == 7).all())
    assert pool.made == 2


def test_only_the_thread_that_asked_recycles() -> None:
    pool, made = Pool(), []
    with recycling(pool):
        thread = threading.Thread(target=lambda: made.append(memory.empty(ELEMS)))
        thread.start()
        thread.join()
    memory.empty(ELEMS)
    assert pool.made == 0
    assert made[0].numel() == ELEMS


def test_small_and_foreign_memory_is_torchs_own() -> None:
    pool = Pool()
    with recycling(pool):
        memory.empty(SMALL_BYTES - 1, torch.uint8)
        assert memory.empty(ELEMS, device=torch.device("meta")).device.type == "meta"
    assert pool.made == 0


def test_what_is_long_unused_is_given_back() -> None:
    pool = Pool()
    with recycling(pool):
        memory.empty(ELEMS)
        for step in range(2 * IDLE_STEPS):
            if step < IDLE_STEPS:
                memory.empty(3 * ELEMS)
            pool.end_step()
    assert pool.held_bytes == 0


@given(st.integers(SMALL_BYTES, 2**33))
def test_blocks_are_little_larger_than_asked_for(nbytes: int) -> None:
    rounded = memory._rounded(nbytes)
    assert nbytes <= rounded <= max(nbytes * 9 / 8, nbytes + SMALL_BYTES)


@pytest.mark.parametrize("recycled", [True, False])
def test_results_are_as_torchs(recycled: bool) -> None:
    parts = [torch.randn(3, 700), torch.randn(3, 500)]
    with recycling(Pool() if recycled else None):  # type: ignore[arg-type]
        assert torch.equal(memory.cat(parts, dim=1), torch.cat(parts, dim=1))
        assert torch.equal(memory.zeros((5, ELEMS)), torch.zeros(5, ELEMS))
        assert torch.equal(memory.padded(parts[0][0], 2000), torch.nn.functional.pad(parts[0][0], (0, 1300)))


def test_neighbours_are_joined_without_a_copy() -> None:
    whole = torch.arange(10.0)
    joined = memory.joined([whole[1:3], whole[3:7].view(2, 2), whole[7:8]])
    assert joined is not None
    assert joined.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert joined.data_ptr() == whole[1:].data_ptr()


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda x: [x[:3], x[4:]], id="a gap"),
        pytest.param(lambda x: [x[3:], x[:3]], id="another order"),
        pytest.param(lambda x: [x[:3], x[3:].clone()], id="other memory"),
        pytest.param(lambda x: [x[:3], x[3:].view(torch.int32)], id="another dtype"),
        pytest.param(lambda x: [x[:2], x[2:8].view(3, 2).t()], id="not contiguous"),
    ],
)
def test_others_are_not_joined(parts: Callable[[Tensor], list[Tensor]]) -> None:
    assert memory.joined(parts(torch.arange(10.0))) is None
