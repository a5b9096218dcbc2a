"""The wire format, byte by byte, and what is not it."""

from __future__ import annotations

import msgspec
import pytest

from makespan.envs import protocol as p
from makespan.rollout.errors import FormatError


def test_a_frame_is_a_version_byte_and_one_tagged_map() -> None:
    frame = p.encode(p.Close(id="a/1", session="s"))
    # Written by hand: 01, a map of 3, "type" "close", "id" "a/1", "session" "s".
    assert frame == b"\x01\x83\xa4type\xa5close\xa2id\xa3a/1\xa7session\xa1s"


def test_a_request_written_by_another_implementation_is_understood() -> None:
    frame = b"\x01" + msgspec.msgpack.encode(
        {"type": "act", "id": "x", "session": "s", "seq": 1, "action": {"text": "hi"}, "key": 2, "not": "known"}
    )
    request = p.decode_request(frame)
    assert isinstance(request, p.Act)
    assert (request.id, request.session, request.seq, request.key) == ("x", "s", 1, 2.0)
    assert msgspec.msgpack.decode(request.action) == {"text": "hi"}


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "an empty frame"),
        (b"\x02\x80", "protocol version 2 is not spoken here"),
        (b"\x01", "not a request of version 1"),
        (b"\x01\x80", "missing required field `type`"),
        (b"\x01\x81\xa4type\xa4nope", "Invalid value 'nope'"),
        (b"\x01\x82\xa4type\xa6result\xa2id\xa1x", "Invalid value 'result'"),
        (b"\x01\x82\xa4type\xa6status\xa2id\xa0", "length >= 1"),
        (b"\x01\x82\xa4type\xa6status\xa2id\xa1\xff", "UTF-8"),
        (b"\x01\x82\xa4type\xa6status\xa2id\xa1xtrailing", "trailing"),
        (b"\x01" + b"\x91" * 100_000, "not a request of version 1"),
    ],
)
def test_what_is_not_a_request_is_a_format_error(frame: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        p.decode_request(frame)


def test_an_unknown_version_is_recognised_before_anything_else_is_interpreted() -> None:
    with pytest.raises(FormatError, match="version 255"):
        p.decode_request(b"\xff" + b"\xc1" * 10)  # c1 is no MessagePack at all
