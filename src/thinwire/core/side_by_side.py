"""Several exchanges in the same rounds, so that they take no longer than the longest."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from thinwire.core.request import Request

Asked = Mapping[int, Any]  # by exchange, what it asks for in a round: a request or a tuple of them
Asking = Generator[Any, Any, Any]
Round = Generator[tuple[Request, ...], Any, dict[int, Any]]


def ask(request: Request) -> Asking:
    """One request as an exchange of its own; returns the reply."""
    return (yield request)


def one_by_one(asked: Asked) -> Round:
    """A round in which every request is a message of its own."""
    answers = iter((yield tuple(r for one in asked.values() for r in (one if isinstance(one, tuple) else (one,)))))
    return {
        index: tuple(next(answers) for _ in one) if isinstance(one, tuple) else next(answers)
        for index, one in asked.items()
    }


def side_by_side(
    exchanges: Sequence[Asking], ask_round: Callable[[Asked], Round] = one_by_one
) -> Generator[tuple[Request, ...], Any, list[Any]]:
    """Run exchanges in the same rounds; returns their results in order. Those that need fewer rounds drop out.

    Args:
        ask_round: asks for everything that the exchanges want in a round, and returns the replies by exchange.
    """
    results: list[Any] = [None] * len(exchanges)
    replies: dict[int, Any] = dict.fromkeys(range(len(exchanges)))
    while True:
        asked: dict[int, Any] = {}
        for index, reply in replies.items():
            try:
                asked[index] = exchanges[index].send(reply)
            except StopIteration as stop:
                results[index] = stop.value
        if not asked:
            return results
        replies = yield from ask_round(asked)
