"""What a user got wrong: one line on standard error and exit status 2, and found before any long work begins."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

MISTAKE_STATUS = 2
_UsageError: Any = typer.BadParameter.__base__  # typer exports its subclasses only


class Commands(TyperGroup):
    """Commands whose mistakes are one line: neither a traceback nor the usage around it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except _UsageError as error:
            words = " ".join(error.format_message().split())
            said = f"{words} See: {error.ctx.command_path if error.ctx else 'thinwire'} --help"
        except Exception as error:
            if not _is_mistake(error):
                raise
            said = str(error)
        typer.echo(f"thinwire: {said}", err=True)
        raise typer.Exit(MISTAKE_STATUS)


def _is_mistake(error: Exception) -> bool:
    from thinwire.core import ThinwireError  # not at the top: --help must not wait for torch
    from thinwire.lab import LabError

    expected = isinstance(error, ValueError | OSError | ThinwireError | LabError)
    return expected and not isinstance(error, BrokenPipeError)


def between(low: float, high: float = math.inf) -> Callable[[float | None], float | None]:
    """The callback of an option that takes a number; neither NaN nor infinite, which min= and max= let pass."""
    expected = f"at least {low}, and finite" if high == math.inf else f"{low} to {high}"

    def check(value: float | None) -> float | None:
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise typer.BadParameter(f"got {value}, expected {expected}.")
        return value

    return check


def check_outputs(
    files: Mapping[str, Path | None], *, folders: Mapping[str, Path | None] = {}, inputs: Iterable[Path] = ()
) -> None:
    """Try to write every output before anything is computed for it; nothing is left behind.

    Args:
        files: by option; None where it was not given. Likewise ``folders``, in which files will be written.

    Raises:
        ValueError: one cannot be written, would overwrite an input, or two are the same.
    """
    taken = {path.resolve(): "an input" for path in inputs}
    for option, path in {**files, **folders}.items():
        if path is None:
            continue
        file = path / "probe" if option in folders else path
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise ValueError(f"{option} is {path}, which is {other} too; give it a file of its own")
        new = [one for one in (file, *file.parents) if not os.path.lexists(one)]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("ab").close()
        except OSError as error:
            raise ValueError(
                f"{option} is {path}, which cannot be written: {error.strerror}; choose another"
            ) from error
        finally:
            for one in new:  # the file, then its folders from the inside out
                with suppress(OSError):
                    one.unlink() if one.is_file() else one.rmdir()
