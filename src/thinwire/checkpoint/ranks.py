"""What ranks tell each other about checkpoints: a run's name, whether all are ready, which points all can load.

Over a process group of its own on CPU, so that it never meets a collective of the training. Bytes and JSON, no pickle.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The processes that train together; one alone where torch.distributed is not initialised.

    Args:
        group: who trains together; default: all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world_size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
            if self.world_size > 1:
                members = None if group is None else dist.get_process_group_ranks(group)
                self._group = dist.new_group(members, backend="gloo")

    def all_true(self, mine: bool) -> bool:
        """Whether it holds on every rank."""
        if self._group is None:
            return mine
        vote = torch.tensor([int(mine)])
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())

    def largest(self, *mine: float) -> list[float]:
        """The largest of each number over the ranks."""
        numbers = torch.tensor(mine, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        return numbers.tolist()

    def gather(self, mine: Any) -> list[Any]:
        """Everybody's value (JSON), by rank."""
        if self._group is None:
            return [mine]
        text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([text.numel()]), group=self._group)
        longest = int(max(size.item() for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)  # gloo mixes up all-gathers of unequal lengths
        padded[: text.numel()] = text
        everyone = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(everyone, padded, group=self._group)
        return [_read(one[: int(size.item())]) for one, size in zip(everyone, sizes, strict=True)]

    def of_rank_0(self, mine: Any) -> Any:
        """Rank 0's value (JSON)."""
        return self.gather(mine if self.rank == 0 else None)[0]

    def close(self) -> None:
        """Give the process group back."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _read(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()))
