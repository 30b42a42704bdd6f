"""Messages over a socket: whole whatever the pieces they come in, and nobody waits for the other side."""

import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.frames import CHUNK, READS, Channel, Frames, pack, wait


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    both = socket.socketpair()
    channels = Channel(both[0]), Channel(both[1])
    yield channels
    for channel in channels:
        channel.close()


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 30), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_messages_are_whole_whatever_the_pieces(messages: list[bytes], sizes: list[int]) -> None:
    data = b"".join(map(pack, messages))
    frames, found, start, turn = Frames(), [], 0, 0
    while start < len(data):
        size = sizes[turn % len(sizes)]
        found += frames.feed(data[start : start + size])
        start, turn = start + size, turn + 1
    assert found == messages


def test_a_message_larger_than_the_socket_holds_waits_until_it_is_read(ends: tuple[Channel, Channel]) -> None:
    sender, reader = ends
    large = "ü" * 2**20
    began = time.perf_counter()
    sender.send(large)
    sender.send("next")
    assert sender.unsent and time.perf_counter() - began < 2
    found = reader.receive()
    assert found == []  # half a message is none
    while sender.unsent:
        wait([sender], 5)
        found += reader.receive()
    assert found == [large, "next"]


def test_much_is_read_in_parts(ends: tuple[Channel, Channel]) -> None:
    """However fast the sender is."""
    sender, reader = ends
    parts = READS * CHUNK // 2**16 + 8
    for number in range(parts):
        sender.send((number, bytes(2**16)))
    found: list[tuple[int, bytes]] = []
    while len(found) < parts:
        wait([reader, sender], 5)
        some = reader.receive()
        assert sum(len(body) for _, body in some) <= READS * CHUNK
        found += some
    assert [number for number, _ in found] == list(range(parts))


def test_waiting_ends_with_a_message_and_with_the_time(ends: tuple[Channel, Channel]) -> None:
    sender, reader = ends
    began = time.perf_counter()
    wait([reader], 0.02)
    assert time.perf_counter() - began >= 0.02
    assert reader.receive() == []
    sender.send((1, "a"))
    wait([reader], 60)
    assert reader.receive() == [(1, "a")]


def test_what_was_said_before_the_end_is_read_and_then_the_end(ends: tuple[Channel, Channel]) -> None:
    sender, reader = ends
    sender.send("last words")
    sender.close()
    assert reader.receive() == ["last words"]
    with pytest.raises(EOFError):
        reader.receive()
    reader.send("to nobody")
    reader.send("to nobody")
    assert not reader.unsent
    with pytest.raises(EOFError):
        reader.receive()
