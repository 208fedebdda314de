"""Who averages, who must agree, and who decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch

from thinwire.comm.link import Link, ask
from thinwire.core import AllGather
from thinwire.exchange.flags import Flags


class Membership(Protocol):
    """Gives a transaction its link, and has the last word on whether it commits."""

    def link(self) -> Link:
        """For the next transaction. After a change of members it is another one: ranks and sizes are fixed per link."""

    def settle(self, flags: Flags, mine: Mapping[str, float], error: BaseException | None) -> Flags:
        """After the data, in the training thread: the final flags.

        Args:
            flags: what the ranks that average have agreed on; not ok where the link failed.
            mine: the scalars of this rank.
            error: why the link failed, if it did. Raise it, or return flags that are not ok.
        """


class Fixed:
    """Always the same ranks; an error ends the job.

    Args:
        link: of the ranks that average.
        agreement: of the ranks that must agree, where these are more: with sharded parameters a NaN in one shard must
            abort the transactions of all. Scalars are then by rank of this link. One message more per transaction.
    """

    def __init__(self, link: Link, agreement: Link | None = None) -> None:
        self._link, self._agreement = link, agreement

    def link(self) -> Link:
        return self._link

    def settle(self, flags: Flags, mine: Mapping[str, float], error: BaseException | None) -> Flags:
        if error is not None:
            raise error
        if self._agreement is None:
            return flags
        numbers = torch.tensor([float(flags.ok), *(mine.get(name, 0.0) for name in flags.scalars)])
        gathered = self._agreement.run(ask(AllGather(numbers.view(torch.uint8).to(self._agreement.device))))
        rows = [bytes(row.cpu().tolist()) for row in gathered]
        oks, *scalars = zip(
            *(torch.frombuffer(bytearray(row), dtype=torch.float32).tolist() for row in rows), strict=True
        )
        return replace(flags, ok=all(oks), scalars={n: list(s) for n, s in zip(flags.scalars, scalars, strict=True)})
