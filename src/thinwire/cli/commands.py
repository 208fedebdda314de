"""All commands. They import what they need when they run, so that ``--help`` answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from thinwire import __version__
from thinwire.cli import bench, checkpoint, compressors, demo, doctor, lab, plan, probe, report
from thinwire.cli.mistakes import Commands

app = typer.Typer(
    name="thinwire",
    cls=Commands,
    help="Train PyTorch models over slow networks.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thinwire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


app.command("demo")(demo.demo)
app.command("probe")(probe.probe)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.command("compressors")(compressors.compressors)
app.command("bench", context_settings=bench.PASSED_ON)(bench.bench)
app.add_typer(lab.app, name="lab")
app.add_typer(checkpoint.app, name="checkpoint")
