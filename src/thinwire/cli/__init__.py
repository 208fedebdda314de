"""The ``thinwire`` command."""

from __future__ import annotations

import sys

EXTRA = {"typer", "rich", "plotly"}  # what the extra ``thinwire[cli]`` installs; a training process needs none of it
EXTRA_MISSING_STATUS = 2


def main() -> None:
    """Run the command line, or say in one line what it needs."""
    try:
        from thinwire.cli.commands import app

        app()
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in EXTRA:
            raise
        print(f"thinwire: the command needs {missing}; run: pip install 'thinwire[cli]'", file=sys.stderr)
        sys.exit(EXTRA_MISSING_STATUS)
