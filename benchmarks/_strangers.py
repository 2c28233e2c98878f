"""Strangers of one port, for `strangers.py`: so many connections that say nothing, or the same, held for a while.

    python -S benchmarks/_strangers.py ADDRESS PORT CONNECTIONS SECONDS [WORDS_IN_HEX]

It imports little, so that what a run suffers is theirs and not their start's.
"""

import resource
import socket
import sys
import time
from contextlib import suppress


def main() -> None:
    address, port, connections, seconds, *words = sys.argv[1:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held, said = list[socket.socket](), bytes.fromhex("".join(words))
    for _ in range(int(connections)):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex((address, int(port)))
        held.append(one)
    for one in held if said else ():
        with suppress(OSError):  # put out, or not let in
            one.send(said)
    time.sleep(float(seconds))


if __name__ == "__main__":
    main()
