"""Rates as text, and which host gets which."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.lab import format_rate, parse_rate
from thinwire.lab.rates import MAX_HOSTS, rates_per_host


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("200mbit", 200_000_000),
        ("64kbit", 64_000),
        ("1.5gbit", 1_500_000_000),
        (" 10 Mbit ", 10_000_000),
        ("1000bit", 1000),
        ("unshaped", None),
        ("none", None),
    ],
)
def test_parse_rate(text: str, bits_per_s: int | None) -> None:
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize("text", ["", "fast", "200", "200mb", "-1mbit", "1e6bit", "200mbit/s", "٣mbit", "mbit"])
def test_what_is_not_a_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 200mbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["0mbit", "999bit", "0.5kbit"])
def test_rates_too_slow_to_shape_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="use 1kbit to 10000gbit"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("bits_per_s", "text"),
    [
        (200_000_000, "200mbit"),
        (1_500_000, "1.5mbit"),
        (10**10, "10gbit"),
        (1_000_001, "1.000001mbit"),
        (None, "unshaped"),
    ],
)
def test_format_rate(bits_per_s: int | None, text: str) -> None:
    assert format_rate(bits_per_s) == text


@given(st.none() | st.integers(min_value=1000, max_value=10**13))
def test_text_and_rate_are_inverse(bits_per_s: int | None) -> None:
    assert parse_rate(format_rate(bits_per_s)) == bits_per_s


def test_one_rate_for_all_or_one_each() -> None:
    assert rates_per_host(3, "1mbit") == (10**6,) * 3
    assert rates_per_host(2) == (None, None)
    assert rates_per_host(3, rates=["1mbit", 2_000_000, None]) == (10**6, 2 * 10**6, None)


@pytest.mark.parametrize(
    ("hosts", "rate", "rates", "message"),
    [
        (0, None, None, "got 0 hosts"),
        (MAX_HOSTS + 1, None, None, "between 1 and"),
        (2, None, ["1mbit"], "got 1 rates for 2 hosts"),
        (1, "1mbit", ["1mbit"], "give one of them"),
        (1, 10, None, "use 1kbit to 10000gbit"),
    ],
)
def test_impossible_requests_say_what_is_wrong(
    hosts: int, rate: str | int | None, rates: list[str] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rates_per_host(hosts, rate, rates)
