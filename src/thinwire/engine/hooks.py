"""Hooks that a copy of the module does not take along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook on a module that copies and pickles to one that does nothing.

    ``copy.deepcopy``, EMA models and ``torch.save(model)`` copy a module with its hooks. An engine holds process groups and
    threads, which cannot be copied; and a copy is not averaged, so it needs none of it.
    """

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        if self._function is not None:
            self._function(*arguments)

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()
