"""Link rates as text: `"200mbit"` <-> bits per second, `"unshaped"` <-> None."""

import re
from collections.abc import Sequence
from decimal import Decimal

UNSHAPED = "unshaped"
MIN_BITS_PER_S, MAX_BITS_PER_S = 10**3, 10**13
MAX_HOSTS = 200  # they share one /24 network
_BITS_PER_UNIT = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
_RATE = re.compile(r"(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>[gmk]?bit)", re.ASCII)


def parse_rate(text: str) -> int | None:
    """Return the bits per second that `text` names, or None for "unshaped" (or "none")."""
    cleaned = text.strip().lower()
    if cleaned in (UNSHAPED, "none"):
        return None
    match = _RATE.fullmatch(cleaned)
    if match is None:
        raise ValueError(
            f"rate {text!r} is not a link rate; write a number and kbit, mbit or gbit (per second), "
            f"such as 200mbit or 1.5gbit, or {UNSHAPED} for no limit"
        )
    return _checked_rate(int(Decimal(match["value"]) * _BITS_PER_UNIT[match["unit"]]))


def format_rate(bits_per_s: int | None) -> str:
    """Return the text that `parse_rate` reads back as exactly this rate."""
    if bits_per_s is None:
        return UNSHAPED
    unit = next(name for name, size in _BITS_PER_UNIT.items() if bits_per_s >= size or size == 1)
    whole, fraction = divmod(bits_per_s, _BITS_PER_UNIT[unit])
    digits = len(str(_BITS_PER_UNIT[unit])) - 1
    decimals = f"{fraction:0{digits}d}".rstrip("0") if fraction else ""
    return f"{whole}.{decimals}{unit}" if decimals else f"{whole}{unit}"


def as_bits_per_s(rate: str | int | None) -> int | None:
    """Accept a rate as text, as bits per second, or as None."""
    if isinstance(rate, str):
        return parse_rate(rate)
    return None if rate is None else _checked_rate(rate)


def rates_per_host(
    hosts: int, rate: str | int | None = None, rates: Sequence[str | int | None] | None = None
) -> tuple[int | None, ...]:
    """Return one rate per host, from one rate for all (`rate`) or from a list with one entry each (`rates`)."""
    if not 1 <= hosts <= MAX_HOSTS:
        raise ValueError(f"got {hosts} hosts; a lab has between 1 and {MAX_HOSTS}")
    if rates is None:
        return (as_bits_per_s(rate),) * hosts
    if rate is not None:
        raise ValueError(f"got both rate={rate!r} and rates={list(rates)!r}; give one of them")
    if len(rates) != hosts:
        raise ValueError(f"got {len(rates)} rates for {hosts} hosts; give one per host, or a single rate for all")
    return tuple(as_bits_per_s(each) for each in rates)


def _checked_rate(bits_per_s: int) -> int:
    if not MIN_BITS_PER_S <= bits_per_s <= MAX_BITS_PER_S:
        raise ValueError(f"rate {bits_per_s} bit per second cannot be shaped; use 1kbit to 10000gbit, or {UNSHAPED}")
    return bits_per_s
