"""Several exchanges in the same rounds."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from thinwire.core import Request

Asking = Generator[Request | tuple[Request, ...], Any, Any]


def ask(request: Request) -> Asking:
    """One request as an exchange of its own; returns the reply."""
    return (yield request)


def side_by_side(exchanges: Sequence[Asking]) -> Generator[tuple[Request, ...], Any, list[Any]]:
    """Run exchanges in the same rounds, so that they take no longer than the longest; returns their results in order."""
    results: list[Any] = [None] * len(exchanges)
    replies: dict[int, Any] = dict.fromkeys(range(len(exchanges)))
    while True:
        asked: dict[int, Request | tuple[Request, ...]] = {}
        for index, reply in replies.items():
            try:
                asked[index] = exchanges[index].send(reply)
            except StopIteration as stop:
                results[index] = stop.value
        if not asked:
            return results
        answers = iter((yield tuple(r for one in asked.values() for r in (one if isinstance(one, tuple) else (one,)))))
        replies = {
            index: tuple(next(answers) for _ in one) if isinstance(one, tuple) else next(answers)
            for index, one in asked.items()
        }
