"""Pages use the field's terms, not private ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What is made from docstrings and commands is checked with the source.
GENERATED = {"docs/reference/cli.md", "docs/reference/compressors.md"}
PAGES = [
    path
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*")])
    if path.relative_to(ROOT).as_posix() not in GENERATED | {"CHANGELOG.md"}
]
PRIVATE = re.compile(
    r"\b(anew|whoever|in turns|(?:come|comes|came|coming) to|of then|(?:stand|stands|standing|stood) still"
    r"|meets?|shares?|gathered|agreed|latest|words?|wish(?:es|ed)?|refus(?:e|es|ed|al)|counts|courses?|books?|booked"
    r"|riding|rides?|on board|ow(?:e|es|ed)|room|quiet|ratios?)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`|<!--.*?-->", re.MULTILINE | re.DOTALL)


def private_words(text: str) -> list[str]:
    """Those outside of code; names and messages are the code's."""
    return [match[0] for match in PRIVATE.finditer(_CODE.sub("", text))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_private_words(page: Path) -> None:
    assert not private_words(page.read_text(encoding="utf-8"))


def test_private_words_are_found() -> None:
    assert private_words("It is made anew; `meet` is code, and ranks meet.") == ["anew", "meet"]
