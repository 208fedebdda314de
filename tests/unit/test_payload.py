"""Payloads: what goes in comes out, and bytes that are no payload are refused before anything is made of them."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core import Payload, PayloadError
from thinwire.core.payload import _CODE_OF

DTYPES = sorted(_CODE_OF, key=str)
names = st.text("abcdefgh_0", min_size=1, max_size=8)
contents = st.dictionaries(names, st.tuples(st.sampled_from(DTYPES), st.integers(0, 40)), min_size=1, max_size=16)


def _filled(sizes: dict[str, tuple[torch.dtype, int]]) -> Payload:
    generator = torch.Generator().manual_seed(1)
    draw = {
        name: torch.randint(0, 255, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
        for name, (dtype, numel) in sizes.items()
    }
    return Payload(draw)


@given(contents)
def test_round_trip_and_size(sizes: dict[str, tuple[torch.dtype, int]]) -> None:
    payload = _filled(sizes)
    buffer = payload.to_bytes()
    assert buffer.numel() == Payload.size(sizes)
    again = Payload.from_bytes(buffer)
    assert list(again) == list(payload)
    for name, tensor in payload.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8))


def test_documented_layout() -> None:
    buffer = bytes(Payload(ab=torch.tensor([1, 258], dtype=torch.int16)).to_bytes().tolist())
    assert buffer == b"TWP1\x01\0\0\0" + b"ab\0\0\0\0\0\0" + b"\x03\0\0\0" + struct.pack("<I", 2) + b"\1\0\2\1\0\0\0\0"


def test_tensors_are_views() -> None:
    buffer = Payload(x=torch.ones(3)).to_bytes()
    Payload.from_bytes(buffer)["x"].zero_()
    assert Payload.from_bytes(buffer)["x"].tolist() == [0.0, 0.0, 0.0]


GOOD = bytes(Payload(v=torch.ones(3), i=torch.zeros(5, dtype=torch.uint8)).to_bytes().tolist())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "too short"),
        (GOOD[:7], "too short"),
        (b"XXXX" + GOOD[4:], "begins with"),
        (GOOD[:4] + b"\0" + GOOD[5:], "claims 0 tensors"),
        (GOOD[:4] + b"\xff" + GOOD[5:], "claims 255 tensors"),
        (GOOD[:30], "too short for 2 entries"),
        (GOOD[:16] + b"\x63" + GOOD[17:], "unknown dtype code 99"),
        (GOOD[:20] + b"\xff\xff\xff\xff" + GOOD[24:], "entries add up to"),
        (GOOD[:24] + b"v" + GOOD[25:], "appears twice"),
        (GOOD + b"\0" * 8, "entries add up to"),
        (GOOD[:-1], "entries add up to"),
    ],
)
def test_hostile_bytes_are_refused(data: bytes, problem: str) -> None:
    with pytest.raises(PayloadError, match=problem):
        Payload.from_bytes(_tensor(data))


@given(st.binary(max_size=200))
def test_random_bytes_never_crash(data: bytes) -> None:
    with pytest.raises(PayloadError):
        Payload.from_bytes(_tensor(data))


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_give_a_payload_of_the_same_size_or_an_error(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    try:
        payload = Payload.from_bytes(_tensor(bytes(data)))
    except PayloadError:
        return
    assert Payload.size({name: (t.dtype, t.numel()) for name, t in payload.items()}) == len(GOOD)


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (Payload(), "1 to 16 tensors"),
        (Payload({str(i): torch.ones(1) for i in range(17)}), "1 to 16 tensors"),
        (Payload(exponents=torch.ones(1)), "'exponents'"),
        (Payload({"": torch.ones(1)}), "name"),
        (Payload({"é": torch.ones(1)}), "ASCII"),
        (Payload(x=torch.ones(2, 2)), "1-D"),
        (Payload(x=torch.tensor(1.0)), "1-D"),
        (Payload(x=torch.ones(2, dtype=torch.float64)), "float64"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(payload: Payload, problem: str) -> None:
    with pytest.raises(PayloadError, match=problem):
        payload.to_bytes()
