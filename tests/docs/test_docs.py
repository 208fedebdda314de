"""README and docs are executed: Python blocks run, ``thinwire`` command lines exist, links and anchors lead somewhere."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

import thinwire
import thinwire.api
from thinwire.cli.commands import app
from thinwire.core import registry

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_WORDS = 1500  # results may be longer, and so may what is made from code
MOST_WORDS_OF_THE_LOG = 2000
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


def _imported(code: str) -> Iterator[tuple[str, str]]:
    """Module and name of everything that code imports from thinwire."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "thinwire":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "thinwire")


def _sources() -> list[tuple[str, str]]:
    """Where, and the code, of all that readers copy."""
    python = [
        block for page in PAGES for block in blocks(page) if block.language == "python" and "--8<--" not in block.body
    ]
    return [
        *((str(block), block.body) for block in python),
        *((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in EXAMPLES),
    ]


@pytest.mark.parametrize(("where", "code"), _sources(), ids=lambda one: one if one.count("\n") == 0 else "")
def test_docs_import_public_names_only(where: str, code: str) -> None:
    """``thinwire``, or a package of it and a name that the package exports."""
    for module, name in _imported(code):
        assert module.count(".") <= 1, f"{where}: {module} is not public"
        package = importlib.import_module(module)
        is_package = module == "thinwire" and (Path(thinwire.__file__).parent / name).is_dir()
        assert not name or name in package.__all__ or is_package, f"{where}: {module} does not export {name}"


def _anchors(page: Path) -> set[str]:
    """Of the headings of a page, as Markdown makes them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = (re.sub(r"[`*]", "", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
            other = page.parent / target if target else page
            if "://" in target:
                continue
            if not other.exists() or (anchor and anchor not in _anchors(other)):
                broken.append(f"{page.relative_to(ROOT)} -> {target}#{anchor}")
    assert not broken


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8"))}
    assert named <= targets
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {"demo", "test"} <= set(re.findall(r"^make ([a-z-]+)", readme, re.MULTILINE))


def test_benchmarks_that_pages_name_exist() -> None:
    named = {
        name for page in PAGES for name in re.findall(r"python -m (benchmarks[\w.]+)", page.read_text(encoding="utf-8"))
    } - {"benchmarks.NAME", "benchmarks.step.priority"}  # a placeholder; of the log, at the commit that it names
    missing = [name for name in named if importlib.util.find_spec(name) is None]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_are_short(page: Path) -> None:
    """Prose and tables; code and what is between the bars of a table are no words."""
    if page.parent.name == "results" or page.name in ("cli.md", "compressors.md", "CHANGELOG.md"):
        return
    words = re.findall(r"[^\s|]+", _FENCE.sub("", page.read_text(encoding="utf-8")))
    assert len(words) <= (MOST_WORDS_OF_THE_LOG if page.name == "log.md" else MOST_WORDS)


def test_pages_that_the_source_names_exist() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))}
    assert not [name for name in named if not (ROOT / name).exists()]


def test_code_map_names_every_package() -> None:
    packages = {path.parent.name for path in Path(thinwire.__file__).parent.glob("*/__init__.py")}
    named = re.findall(r"`thinwire\.(\w+)`", (ROOT / "docs/reference/code-map.md").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(packages)


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
