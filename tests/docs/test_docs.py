"""README and docs are executed: every Python block runs, every ``thinwire`` command line exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

import thinwire.api  # noqa: F401  (fills the registry before a test works on a copy of it)
from thinwire.cli.commands import app
from thinwire.core import registry

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")) if path.exists()
)
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
_OPT_OUT = re.compile(r"<!-- not executed: (?:(?!-->).)+-->\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        line: of its first line of code, counted from 1.
        executed: false after a comment that says why not.
    """

    page: Path
    line: int
    language: str
    body: str
    executed: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("body")) + 1
        executed = _OPT_OUT.search(text, 0, match.start()) is None
        body = "\n".join(row.removeprefix(match["indent"]) for row in match["body"].splitlines())
        yield Block(page, line, match["language"], body, executed)


def _python_pages() -> list[Path]:
    return [page for page in PAGES if any(b.language == "python" and b.executed for b in blocks(page))]


def _commands() -> list[tuple[str, str]]:
    """Where, and the words after ``thinwire``, for every command line in a shell block."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.language in ("console", "bash", "sh", "shell"):
                for row in block.body.replace("\\\n", " ").splitlines():
                    match = re.match(
                        r"^(?:[$#] )?(?:\w+=\S+ )*(?:sudo )?(?:\.venv/bin/)?thinwire(?: (.*))?$", row.strip()
                    )
                    if match:
                        found.append((str(block), match[1] or ""))
    return found


@pytest.mark.parametrize("page", _python_pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks_run(
    page: Path, single_rank_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page run in order and share their names, as for a reader who types them one after the other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    names: dict[str, Any] = {"__name__": "__docs__"}
    for block in blocks(page):
        if block.language == "python" and block.executed:
            # Empty lines before the code make the line numbers of a traceback those of the page.
            code = compile("\n" * (block.line - 1) + block.body, str(page), "exec")
            exec(code, names)


@pytest.mark.parametrize(("where", "words"), _commands())
def test_commands_exist(where: str, words: str) -> None:
    """Every word that names a command does, and every option is one of that command."""
    command: Any = typer.main.get_command(app)
    rest = shlex.split(re.split(r"(?:^| )-- ", words)[0], comments=True)  # what follows is somebody else's command
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        assert name in command.commands, f"{where}: thinwire has no command {name!r}; it has {sorted(command.commands)}"
        command = command.commands[name]
    passes_on = command.context_settings.get("ignore_unknown_options", False)
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        option = word.split("=")[0]
        if re.fullmatch(r"--?[a-z][a-z-]*", option) and not passes_on:
            assert option in known | {"--help"}, f"{where}: {words!r} has no option {option}; it has {sorted(known)}"


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.gloo
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    """On one rank, without torchrun: its own store would listen on every interface."""
    group = f"init_method='file://{tmp_path}/store', rank=0, world_size=1"
    start = (
        "import runpy, sys, torch.distributed as dist;"
        "init = dist.init_process_group;"
        f"dist.init_process_group = lambda backend: init(backend, {group});"
        f"sys.argv = ['{example.name}', '--steps', '3'];"
        f"runpy.run_path({str(example)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout or "sent" in done.stdout


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert not broken


def test_this_module_reads_blocks() -> None:
    """The reader itself: indentation, languages, opt-outs and line numbers."""
    page = ROOT / "tests" / "docs" / "sample.md"
    got = [(b.line, b.language, b.body, b.executed) for b in blocks(page)]
    assert got == [
        (4, "python", "x = 1", True),
        (9, "python", "import nowhere", False),
        (15, "console", "$ thinwire demo --quick", True),
        (19, "", "plain", True),
    ]
