"""The ``thinwire`` command. Commands import what they need when they run, so that ``--help`` answers at once."""

from __future__ import annotations

from collections.abc import Callable

import typer

from thinwire.cli import bench_contest, bench_step, compressors, demo, doctor, lab, plan, probe, report

app = typer.Typer(
    name="thinwire",
    help="Train PyTorch models over slow networks.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
bench = typer.Typer(help="Measure: kernels against plain torch, step times on a slow network.", no_args_is_help=True)
app.command("demo")(demo.demo)
app.command("probe")(probe.probe)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.command("compressors")(compressors.compressors)
app.add_typer(lab.app, name="lab")
app.add_typer(bench, name="bench")
bench.command("step")(bench_step.bench_step_command)
bench.command("contest")(bench_contest.bench_contest_command)

# The module of this benchmark imports torch to declare its options: its arguments, --help too, are passed on to it.
_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


@bench.command("kernels", context_settings=_PASSED_ON, add_help_option=False)
def bench_kernels(context: typer.Context) -> None:
    """Time the kernels against plain torch (--help lists the options)."""
    from thinwire.cli.bench_kernels import bench_kernels_command

    _pass_on(context, bench_kernels_command)


def _pass_on(context: typer.Context, command: Callable[..., None]) -> None:
    single = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    single.command()(command)
    single(context.args, prog_name=context.command_path)


def main() -> None:
    """Run the command line."""
    app()
