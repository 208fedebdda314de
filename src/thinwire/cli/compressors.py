"""``thinwire compressors``: what there is, as a table for people or for the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from thinwire.core import Listing

PREFACE = """# Compressors

`make docs` writes this page with `thinwire compressors --markdown`. A wrapper stands before what it wraps:
`momentum(mu=0.9) | topk(density=0.01)`. *Stable* means that a study in [Results](../results/index.md) shows its effect on
real tasks. *Experimental* means that it passes its tests, no more.
"""


def compressors(
    markdown: Annotated[bool, typer.Option("--markdown", help="As a page for the docs.")] = False,
) -> None:
    """List the compressors: names, arguments, what they do, and how far each has been shown to work."""
    import thinwire

    listings = thinwire.available()
    if markdown:
        typer.echo(as_markdown(listings), nl=False)
    else:
        Console().print(_as_table(listings))


def as_markdown(listings: list[Listing]) -> str:
    """The docs page."""
    rows = [
        f"| `{_shown_name(one)}` | {', '.join(f'`{a}`' for a in one.arguments)} | {one.maturity} | {_cell(one.summary)} |"
        for one in listings
    ]
    return "\n".join([PREFACE, "| name | arguments | maturity | what it does |", "|---|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _shown_name(listing: Listing) -> str:
    return f"{listing.name} \\| ..." if listing.wrapper else listing.name


def _as_table(listings: list[Listing]) -> Table:
    table = Table(title="compressors", title_justify="left")
    for column in ("name", "arguments", "maturity", "what it does"):
        table.add_column(column)
    for one in listings:
        name = f"{one.name} | ..." if one.wrapper else one.name
        table.add_row(Text(name, style="bold"), Text(", ".join(one.arguments)), Text(one.maturity), Text(one.summary))
    return table
