"""`llamarl watch RUN [OTHER ...]`, and the process of `llamarl train --watch`."""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from llamarl.cli.options import command_parser
from llamarl.cluster.start_up import dependent
from llamarl.parts.page.cli.report import decoder, shown_folders
from llamarl.parts.page.live import Watched, build_app

EPILOG = """It only reads the folders of runs, which may be running, finished, or on a mounted disk of another machine.
Everybody who knows the address with its random part can see the page. Ctrl-C ends it."""
START_S, END_S = 20.0, 5.0
"""Maximum seconds for the page's process to start and to stop."""
NICENESS = 19
"""Nice value of the page's process, so that the run has priority."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = command_parser("watch", "Show the page of `llamarl report`, live.", EPILOG)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, such as runs/demo")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes any free one (0)")
    options = parser.parse_args(arguments)
    folders, token = shown_folders(options.runs), secrets.token_urlsafe(18)
    app = build_app([Watched(folder, decoder(folder)) for folder in folders], token)

    from llamarl.run.web import LOOPBACK, listening, serving

    with listening(options.host, options.port) as opened:
        os.nice(NICENESS)
        host, port = opened.getsockname()[:2]
        print(f"watch at http://{f'[{host}]' if ':' in host else host}:{port}/{token}/", flush=True)
        hosts = LOOPBACK if options.host in LOOPBACK else ()
        asyncio.run(serving(app, hosts).serve(sockets=[opened]))
    return 0


@contextmanager
def watching(folder: Path) -> Iterator[str]:
    """Serves the page of a run from a separate process. Yields a sentence with the address."""
    # A separate process group: Ctrl-C reaches only the run, which then stops this process.
    command = [*dependent("from llamarl.parts.page.cli.watch import main; main(sys.argv[1:])"), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            assert process.stdout is not None
            has_said, _, _ = select.select([process.stdout], [], [], START_S)
            said = process.stdout.readline().strip() if has_said else ""
            yield said or f"--watch does not answer; the run continues without it, try llamarl watch {folder}"
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
