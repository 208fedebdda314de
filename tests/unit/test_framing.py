"""Headers: a message of another step, group, channel or setting, or with changed bytes, is found and its sender named."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sim.threads import ThreadedWorld, run_ranks
from thinwire.comm import Framed, Pending, Tag, Transport
from thinwire.comm.framing import HEADER_BYTES
from thinwire.comm.transport import Later
from thinwire.core import AllGather, AllReduce, AllToAll, DesyncError, Reply, Request, memory

TAG = Tag(3, 1, 0, 9)
BODY = torch.arange(20, dtype=torch.uint8)


class Echo:
    """A world of two in which rank 1 sends what ``change`` makes of rank 0's message."""

    rank, world_size, lanes = 0, 2, 1

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda message: message) -> None:
        self.change = change

    def start(self, request: Request, tag: Tag) -> Pending:
        def reply() -> Reply:
            if isinstance(request, AllGather):
                return [request.message, self.change(request.message.clone())]
            assert isinstance(request, AllToAll)
            return [request.messages[0], self.change(request.messages[0].clone())]

        return Later(reply)


def _ask(transport: Transport, config: int = 5, tag: Tag = TAG) -> Reply:
    return Framed(transport, config).start(AllGather(BODY), tag).wait()


def test_intact_messages_pass() -> None:
    assert [one.tolist() for one in _ask(Echo())] == [BODY.tolist()] * 2
    rows = torch.stack([BODY, BODY])
    assert [one.tolist() for one in Framed(Echo()).start(AllToAll(rows), Tag()).wait()] == [BODY.tolist()] * 2


def test_a_header_is_put_into_the_room_before_a_message() -> None:
    room = memory.with_headroom(2, 24)
    request = AllToAll.of(room)
    request.messages[:] = torch.arange(48).view(2, 24)
    sent: list[Tensor] = []

    class Noting(Echo):
        def start(self, request: Request, tag: Tag) -> Pending:
            assert isinstance(request, AllToAll)
            sent.append(request.messages)
            return Later(lambda: request.messages)

    received = Framed(Noting()).start(request, Tag()).wait()
    assert sent[0].data_ptr() == room.data_ptr()
    assert isinstance(received, Tensor), "a matrix stays one"
    assert received.data_ptr() == request.messages.data_ptr()
    assert received.flatten().tolist() == list(range(48))


def test_the_sender_of_a_damaged_row_of_a_matrix_is_named() -> None:
    class Damaging(Echo):
        def start(self, request: Request, tag: Tag) -> Pending:
            assert isinstance(request, AllToAll)
            rows = request.messages.clone()
            rows[1, -1] ^= 1
            return Later(lambda: rows)

    with pytest.raises(DesyncError, match="its checksum") as caught:
        Framed(Damaging()).start(AllToAll(torch.stack([BODY, BODY])), Tag()).wait()
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("field", "offset"),
    [
        ("magic", 0),
        ("step", 4),
        ("group", 8),
        ("round", 12),
        ("channel", 16),
        ("config", 20),
        ("length", 28),
        ("checksum", 36),
    ],
)
def test_every_field_is_checked(field: str, offset: int) -> None:
    def change(message: Tensor) -> Tensor:
        message[offset] += 1
        return message

    with pytest.raises(DesyncError, match=f"rank 1 is out of step in step 3, group 1, round 0: its {field}") as caught:
        _ask(Echo(change))
    assert (caught.value.rank, caught.value.field) == (1, field)


@pytest.mark.parametrize("position", range(len(BODY)))
def test_any_flipped_bit_of_the_body_is_found(position: int) -> None:
    def change(message: Tensor) -> Tensor:
        message[HEADER_BYTES + position] ^= 4
        return message

    with pytest.raises(DesyncError, match="checksum"):
        _ask(Echo(change))


def test_a_shorter_message_is_found() -> None:
    with pytest.raises(DesyncError, match="length"):
        _ask(Echo(lambda message: message[:10]))
    with pytest.raises(DesyncError, match="length"):
        _ask(Echo(lambda message: message[:-1]))


def test_the_header_is_as_documented() -> None:
    seen: list[Tensor] = []

    def change(message: Tensor) -> Tensor:
        seen.append(message)
        return message

    _ask(Echo(change), config=0x1122334455667788, tag=Tag(258, 3, 4, 0xFEDCBA98))
    head = bytes(seen[0][:HEADER_BYTES].tolist())
    assert HEADER_BYTES == 40
    assert head[:16] == b"TWM2" + b"\x02\x01\0\0" + b"\x03\0\0\0" + b"\x04\0\0\0"
    assert head[16:20] == bytes.fromhex("98badcfe")
    assert head[20:28] == bytes.fromhex("8877665544332211")
    assert int.from_bytes(head[28:36], "little") == len(BODY)
    assert int.from_bytes(head[36:40], "little") == zlib.crc32(bytes(BODY.tolist()))


def test_reductions_pass_unframed() -> None:
    world = ThreadedWorld(2)

    def rank(index: int) -> list[float]:
        reply = Framed(world.transport(index)).start(AllReduce(torch.full((2,), float(index))), Tag()).wait()
        assert isinstance(reply, Tensor)
        return [float(value) for value in reply]

    assert run_ranks(rank, 2) == [[0.5, 0.5]] * 2
