"""Which connection is next, which one gives way, and what is told of a request without a parser."""

import contextlib
import socket
import sys

import pytest
from fa_serve.server.bounds.crowd import Crowd, is_whole
from fa_serve.server.bounds.guard import ClientNames

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    HEAD + b"Content-Length: 3\r\n\r\nask",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nask\r\n0\r\n\r\n",
]
UNFINISHED = [
    b"",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n",
    HEAD + b"content-length:4\r\n\r\nask",
    HEAD + b"Content-Length: 99999999999999999999\r\n\r\nask",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nask\r\n",
]


@pytest.mark.parametrize("sent", WHOLE)
def test_whole(sent):
    assert is_whole(sent)


@pytest.mark.parametrize("sent", UNFINISHED[:3] + UNFINISHED[4:])
def test_unfinished(sent):
    assert not is_whole(sent)


def test_a_length_that_no_request_has_is_the_parsers_to_refuse():
    assert is_whole(UNFINISHED[3])


@pytest.fixture
def connect():
    """`connect(bytes)`: both ends of a connection whose client has sent these bytes."""
    with contextlib.ExitStack() as files:
        listener = files.enter_context(socket.create_server(("127.0.0.1", 0)))

        def make(sent: bytes = b"") -> tuple[socket.socket, socket.socket]:
            client = files.enter_context(socket.create_connection(listener.getsockname()))
            client.sendall(sent)
            return files.enter_context(listener.accept()[0]), client

        yield make


def all_of(crowd: Crowd) -> list[socket.socket]:
    return [crowd.get() for _ in range(len(crowd))]


def test_each_clients_newest_and_oldest_in_turns(connect):
    crowd = Crowd(lambda sent, address: address)
    given = [connect()[0] for _ in range(4)]
    other = connect()[0]
    for each in given:
        crowd.put(each, "one")
    crowd.put(other, "two")
    assert len(crowd) == 5
    assert all_of(crowd) == [given[3], other, given[0], given[2], given[1]]
    assert len(crowd) == 0


def test_the_client_with_the_most_gives_way(connect):
    crowd = Crowd(lambda sent, address: address)
    one = [connect()[0] for _ in range(2)]
    two = [connect()[0] for _ in range(3)]
    for each in one:
        crowd.put(each, "one")
    for each in two:
        crowd.put(each, "two")
    assert crowd.drop() is two[0]
    assert {crowd.drop(), crowd.drop()} == {two[1], one[0]}
    assert len(crowd) == 2


def test_whole_requests_are_kept_and_come_first(connect):
    crowd = Crowd(lambda sent, address: address)
    given = [connect(sent)[0] for sent in (WHOLE[0], b"GET / ", WHOLE[1])]
    for each in given:
        crowd.put(each, "one")
    assert crowd.drop() is given[1]
    assert crowd.drop() is None
    assert all_of(crowd) == [given[0], given[2]]


@pytest.mark.skipif(sys.platform != "linux", reason="reads TCP_INFO")
def test_who_has_left_gives_way_with_a_whole_request(connect):
    crowd = Crowd(lambda sent, address: address)
    stays, _ = connect(WHOLE[0])
    leaves, client = connect(WHOLE[0])
    crowd.put(stays, "one")
    crowd.put(leaves, "one")
    client.close()
    assert crowd.drop() is leaves
    assert crowd.drop() is None


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"GET / HTTP/1.1\r\nAuthorization: Bearer one-key\r\n\r\n", "key"),
        (b"GET / HTTP/1.1\r\nx-api-key:one-key \r\nHost: x\r\n\r\n", "key"),
        (b"GET / HTTP/1.1\r\nAuthorization: Bearer guess\r\n\r\n", "127.0.0.1"),
        (b"GET / HTTP/1.1\r\nAuthorization: Bearer one-key", "127.0.0.1"),
        (b"", "127.0.0.1"),
    ],
)
def test_a_connection_is_its_keys_or_its_addresses(sent, expected):
    name = ClientNames(("one-key", "another"))(sent, "127.0.0.1")
    assert (name == "127.0.0.1") == (expected == "127.0.0.1")
    assert ClientNames(())(sent, "127.0.0.1") == "127.0.0.1"


def test_addresses_of_one_network_are_one_client():
    names = ClientNames(())
    assert names(b"", "2001:db8::1") == names(b"", "2001:db8::2") != names(b"", "2001:db8:1::1")
