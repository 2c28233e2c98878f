"""Reasons in plain words; those of certificates are with the hosts' own tests."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from llamarl.net.reasons import plain


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)"),
            "no process listens there",
        ),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "this machine has no route there, or no machine has"),
        (OSError(errno.EINVAL, "Invalid argument"), "there is no route from this end's address"),
        (TimeoutError(), "no answer: no machine has that address, or a firewall"),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), "no answer: no machine has that address"),
        (TimeoutError("host b had no answer to `look` after 10 s"), "host b had no answer to `look` after 10 s"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "the host name is unknown"),
        (ConnectionRefusedError("a host b is here already"), "a host b is here already"),
        (EOFError(), "EOFError"),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), "Transport endpoint is not connected"),
    ],
)
def test_what_is_known_is_said_in_plain_words_and_the_rest_as_it_is(error: BaseException, text: str) -> None:
    assert plain(error).startswith(text)


def test_a_port_where_nobody_listens() -> None:
    async def calls() -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            await asyncio.open_connection("127.0.0.1", bound.getsockname()[1])

    with pytest.raises(ConnectionRefusedError) as refused:
        asyncio.run(calls())
    assert plain(refused.value) == "no process listens there"
