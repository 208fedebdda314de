"""``python -m thinwire``: the same as the ``thinwire`` command."""

from thinwire.cli import main

main()
