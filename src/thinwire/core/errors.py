"""Everything thinwire raises. Each message says what was got, what was expected, and what to do."""

from __future__ import annotations


class ThinwireError(Exception):
    """Base of all errors of this library."""


class ConfigError(ThinwireError, ValueError):
    """The user asked for something that does not exist or does not fit together."""


class PayloadError(ThinwireError, ValueError):
    """Bytes that are not a valid payload. Raised before anything is allocated from them."""


class CheckpointError(ThinwireError, ValueError):
    """A saved state that does not belong to this model, world or compressor."""


class TransportError(ThinwireError, RuntimeError):
    """A collective failed or timed out."""


class DesyncError(ThinwireError, RuntimeError):
    """The ranks are not doing the same thing.

    Args:
        field: what differs (for example ``step`` or ``config``).
        rank: the rank whose message does not fit; None where only that some rank differs is known.
        got: what that rank sent.
        expected: what this rank expected.
        where: which message this was (step, group and round).
    """

    def __init__(self, field: str, *, rank: int | None, got: object, expected: object, where: str = "") -> None:
        self.field, self.rank = field, rank
        place = f" in {where}" if where else ""
        who = "some rank" if rank is None else f"rank {rank}"
        super().__init__(
            f"{who} is out of step{place}: its {field} is {got}, expected {expected}. "
            "All ranks must attach the same model with the same settings and run the same number of steps; "
            "restart the job from the last checkpoint."
        )
