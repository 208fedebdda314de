"""All commands. They import what they need when they run, so that ``--help`` answers at once."""

from __future__ import annotations

import typer

from thinwire.cli import bench, checkpoint, compressors, demo, doctor, lab, plan, probe, report

app = typer.Typer(
    name="thinwire",
    help="Train PyTorch models over slow networks.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command("demo")(demo.demo)
app.command("probe")(probe.probe)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.command("compressors")(compressors.compressors)
app.command("bench", context_settings=bench.PASSED_ON)(bench.bench)
app.add_typer(lab.app, name="lab")
app.add_typer(checkpoint.app, name="checkpoint")
