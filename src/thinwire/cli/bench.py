"""``thinwire bench``: runs a benchmark of the repository. Benchmarks measure the project and are not installed with it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

MISSING = (
    "benchmarks are not part of the installed package; clone thinwire's repository and run "
    "'python -m benchmarks.{name}' there"
)
PASSED_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="step, contest, kernels, or another module of benchmarks/.")],
) -> None:
    """Run a benchmark: `thinwire bench step --help` lists the options of one."""
    root = find_repository(Path.cwd(), Path(__file__))
    if root is None:
        raise ValueError(MISSING.format(name=name))
    known = sorted(path.parent.name for path in (root / "benchmarks").glob("*/__main__.py"))
    file = (root / "benchmarks").joinpath(*name.split(".")).with_suffix(".py")
    if name not in known and not (file.is_file() and all(map(str.isidentifier, name.split(".")))):
        raise ValueError(f"there is no benchmark {name!r}; expected {', '.join(known)}, or a module in benchmarks/")
    # The path, not the working directory, leads to the benchmarks: options such as --out are relative to the caller.
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    # Replaces this process, so that Ctrl-C and the exit status are the benchmark's own.
    os.execve(
        sys.executable,
        [sys.executable, "-m", f"benchmarks.{name}", *context.args],
        {**os.environ, "PYTHONPATH": path},
    )


def find_repository(*starts: Path) -> Path | None:
    """The nearest folder above one of ``starts`` that holds thinwire's source and its benchmarks."""
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / "benchmarks" / "contest").is_dir() and (folder / "src" / "thinwire").is_dir():
                return folder
    return None
