"""``thinwire report``: turn the events of runs into a table, an HTML page and TensorBoard logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.cli.mistakes import check_outputs

if TYPE_CHECKING:
    from thinwire.observe.runs import Contest


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Directories of runs (runs/...), or event files.", metavar="RUN...")
    ],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    tensorboard: Annotated[Path | None, typer.Option(help="Also write TensorBoard logs to this directory.")] = None,
) -> None:
    """Make one self-contained HTML report of one or several runs."""
    from thinwire.observe.html.page import write_html
    from thinwire.observe.runs import load_contests
    from thinwire.observe.tensorboard import write_tensorboard

    console = Console()
    check_outputs({"--out": out}, folders={"--tensorboard": tensorboard}, inputs=runs)
    contests = load_contests(runs)
    if tensorboard is not None:
        write_tensorboard(contests, tensorboard)
    write_html(contests, out)
    for contest in contests:
        print_contest(console, contest)
    console.print(f"Report: {out}", highlight=False, soft_wrap=True)


def print_contest(console: Console, contest: Contest) -> None:
    """Print the closing table of one contest, and its result in a sentence."""
    from thinwire.observe.summary import COLUMNS, choices, format_cells, headlines, summarise

    rows = summarise(contest)
    table = Table(title=contest.directory.name, title_justify="left")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left", no_wrap=False)
    for row in rows:
        emphasis = "dim" if row.is_floor else "" if row.is_dense else "bold"
        table.add_row(*(Text(cell) for cell in format_cells(row)), style=emphasis)
    console.print(table)
    for line in [*headlines(rows), *choices(contest)]:
        console.print(Text(line))
