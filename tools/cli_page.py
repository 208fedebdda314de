"""The reference page of the command line, made from the commands: ``python tools/cli_page.py > docs/reference/cli.md``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import typer.main

from thinwire.cli.commands import app

PREFACE = """# Command line

`make docs` writes this page from the commands. `pip install 'thinwire[cli]'` installs the `thinwire` command; a training
process does not need it. `python -m thinwire` is the same command, and `thinwire COMMAND --help` prints what is here.
"""


def page() -> str:
    """The whole page."""
    command: Any = typer.main.get_command(app)
    root = [one for one in command.params if "--help" not in one.opts]
    options = list(table("option", [(f"`{'`, `'.join(one.opts)}`", _default(one), one.help) for one in root]))
    sections = [line for name in sorted(command.commands) for line in section(name, command.commands[name])]
    return "\n".join([PREFACE, *options, *sections]).rstrip() + "\n"


def section(path: str, command: Any) -> Iterator[str]:
    """A command, or those of a group."""
    if hasattr(command, "commands"):
        for name in sorted(command.commands):
            yield from section(f"{path} {name}", command.commands[name])
        return
    yield f"## thinwire {path}\n"
    yield inspect.cleandoc(command.help or "").replace("\n\n\b\n", "\n\n") + "\n"
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and "--help" not in one.opts]
    if arguments:
        yield from table("argument", [(f"`{_shown(one)}`", "", one.help) for one in arguments])
    if options:
        yield from table("option", [(f"`{'`, `'.join(one.opts)}`", _default(one), one.help) for one in options])


def table(what: str, rows: list[tuple[str, str, str | None]]) -> Iterator[str]:
    yield f"| {what} | default | meaning |"
    yield "|---|---|---|"
    for name, default, help_text in rows:
        meaning = (help_text or "").replace("|", "\\|").replace("<", "&lt;")
        yield f"| {name} | {default} | {meaning} |"
    yield ""


def _shown(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper()).strip("[]")


def _default(option: Any) -> str:
    value = option.default
    return f"`{value}`" if isinstance(value, int | float | str) and not isinstance(value, bool) else ""


if __name__ == "__main__":
    sys.stdout.write(page())
