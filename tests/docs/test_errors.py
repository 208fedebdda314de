"""Troubleshooting lists every error message that a user can see, as it is in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinwire

SOURCE = Path(thinwire.__file__).parent
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = sorted(HOW_TO.glob("troubleshooting*.md"))
ERRORS = ("ConfigError", "CheckpointError", "PayloadError", "TransportError", "LabError", "EventError", "ValueError")
INJECTED = "injected fault on rank"  # by the tests' own transport
GAP = "…"


def _template(node: ast.expr) -> str:
    """A message with a gap wherever something is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(value) if isinstance(value, ast.Constant) else GAP for value in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    return GAP


def messages() -> Iterator[str]:
    """All messages of our errors."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                name = ast.unparse(node.exc.func).split(".")[-1]
                text = _template(node.exc.args[0])
                if name in ERRORS and text.strip(GAP) and INJECTED not in text:
                    yield text


def documented() -> list[str]:
    """The first column of the tables."""
    rows = [row for page in PAGES for row in page.read_text(encoding="utf-8").splitlines()]
    return [match[1].replace("\\|", "|") for row in rows if (match := re.match(r"\| `(.+?)` \|", row))]


def _pattern(shown: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in shown.split(GAP)), re.DOTALL)


@pytest.mark.parametrize("message", sorted(set(messages())))
def test_every_message_is_listed(message: str) -> None:
    assert any(_pattern(shown).search(message) for shown in documented()), "add it to docs/how-to/troubleshooting*.md"


def test_every_listed_message_exists() -> None:
    everything = " ".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    # Long messages are split over lines in the source.
    joined = re.sub(r'"\s*\n\s*f?"', "", everything)
    known = [*messages(), joined]
    classes = {"ConfigError", "CheckpointError", "PayloadError", "DesyncError", "TransportError"}
    shown = [one for one in documented() if one not in classes]
    missing = [one for one in shown if not any(_found(one, text) for text in known)]
    assert not missing


def _found(shown: str, text: str) -> bool:
    """All parts of a listed message are in the text."""
    return all(part.strip(" :;,.") in text for part in shown.split(GAP))
