"""`llamarl COMMAND ...`: one module per command, imported when the command runs."""

from __future__ import annotations

import atexit
import errno
import importlib
import io
import os
import resource
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import llamarl
from llamarl.config import ConfigError, did_you_mean
from llamarl.config.ref import part_module
from llamarl.observability.spans import MIN_FILES

COMMANDS = {
    "init": "write the TOML file of a first run, for a model, data and GPUs",
    "train": "run reinforcement learning from a TOML file",
    "explain": "show each setting of a run and what they result in",
    "sft": "fine-tune a checkpoint on worked solutions, or make a small base model from scratch",
    "generate": "answer the prompts of a file",
    "serve": "serve a model over an OpenAI-compatible API",
    "eval": "score a checkpoint on held-out problems",
    "export": "write a run's checkpoint as a Hugging Face folder",
    "plan": "predict step time and find the best layout for a cluster",
    "profile": "measure constants for plan and simulate from a short run",
    "report": "write one HTML file about a run, or several side by side",
    "replay": "repeat a run from its record and compare the results",
    "watch": "show a run in a browser, live",
    "simulate": "run the real controller in virtual time on a simulated cluster",
    "launch": "submit a run on several hosts to Slurm or Kubernetes",
    "certs": "create the TLS certificates of the hosts of a run",
    "host": "make this machine available to a run on several hosts",
    "doctor": "check that this machine can run llamarl",
    "schema": "print the JSON schema of a run file, for editors",
    "completion": "print the completion script for bash, zsh or fish",
}
PARTS_OF = {
    **dict.fromkeys(("explain", "init", "plan", "profile", "simulate"), "forecast"),
    **dict.fromkeys(("generate", "eval"), "answers"),
    **dict.fromkeys(("report", "watch"), "page"),
    **dict.fromkeys(("host", "certs", "launch"), "hosts"),
    "serve": "episodes",
    "replay": "replay",
    "sft": "sft",
}
"""Part of each command that belongs to a part."""

MAX_FILES = 1 << 16
"""Most open files, where the system allows it. Executors inherit the limit."""
_OUTSIDE = {
    errno.ENOSPC: " while writing the output; free space on that disk",
    errno.EMFILE: "; raise the limit (ulimit -n)",
    errno.EIO: ": the terminal was closed",
}
"""Ends of messages on errors outside of a command, by error number."""
_PATHS = (
    errno.EACCES, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT,
    errno.ENOTDIR, errno.EPERM, errno.EROFS,
)  # fmt: skip
"""Error numbers for wrong paths of the user."""
USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130
"""Exit codes: a setting that cannot work; a run that failed; ended by Ctrl-C or SIGTERM."""


def script() -> None:
    """Entry point of the `llamarl` script.

    The process exits before Python's own shutdown, which would end native threads abruptly and could abort the process
    after all work is done.
    """
    codes = [FAILURE]

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()
        os._exit(codes[0])

    atexit.register(leave)  # the first one, so it runs last
    try:
        main()
        codes[0] = 0
    except SystemExit as end:
        codes[0] = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


def main() -> None:
    """Runs the command that the process's arguments name. Ends with SystemExit."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        _print_help()
        return
    if name in ("-V", "--version"):
        print(f"llamarl {llamarl.__version__}")
        return
    if name not in COMMANDS:
        print(f"llamarl: unknown command `{name}`; {did_you_mean(name, COMMANDS)}", file=sys.stderr)
        sys.exit(USER_ERROR)
    for number in (signal.SIGTERM, signal.SIGHUP):  # end any command as Ctrl-C does, children included
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores it
            signal.signal(number, _interrupt)
    try:
        _check_surroundings()
        code = command_module(name).main(sys.argv[2:])
        sys.stdout.flush()
        sys.exit(code)
    except ConfigError as error:
        text = str(error)  # contains the user's text, of any length
        text = text if len(text) <= 1200 else f"{text[:800]}...{text[-400:]}"
        print(f"llamarl {name}: {text}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except BrokenPipeError:  # the reader is gone (`| head`); Python must not flush to it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILURE)
    except OSError as error:
        _end_for(name, error)
    except KeyboardInterrupt as error:
        print(f"llamarl {name}: ended by {str(error) or signal.SIGINT.name}", file=sys.stderr)
        sys.exit(INTERRUPTED)


def command_module(name: str) -> Any:
    """Returns the module of a command. Raises ConfigError if its part is not installed."""
    own = PARTS_OF.get(name)
    return part_module(own, f"cli.{name}") if own else importlib.import_module(f"llamarl.cli.{name}")


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _end_for(name: str, error: OSError) -> NoReturn:
    """Ends the command with a message if the user or the system caused the error. Raises it again otherwise."""
    if error.errno in _PATHS and error.filename is not None:
        cause = f"cannot use {error.filename!s:.800}: {error.strerror}"
        print(f"llamarl {name}: {cause}; give another path, or fix this one", file=sys.stderr)
        sys.exit(USER_ERROR)
    if error.errno not in _OUTSIDE:
        raise error
    print(f"llamarl {name}: {error.strerror}{_OUTSIDE[error.errno]}", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(FAILURE)


def _check_surroundings() -> None:
    """Checks and prepares standard streams, import path and limits. Raises ConfigError."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed by the parent, for this process and its children
            null = os.open(os.devnull, os.O_RDWR)  # may get this number itself, the lowest free one
            os.dup2(null, number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an ASCII terminal shows what it can
    try:
        sys.path.append(os.getcwd())  # for the user's components; last, so that they hide nothing
    except FileNotFoundError:
        raise ConfigError("the working folder has been deleted; change to one that exists") from None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if limit < MIN_FILES:
        raise ConfigError(f"this shell allows {limit} open files (ulimit -n); allow {MIN_FILES}")
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def _print_help() -> None:
    print("usage: llamarl COMMAND [-h] ...\n\ncommands:")
    for name, meaning in COMMANDS.items():
        print(f"  {name:<10}{meaning}")
    print("\n`llamarl COMMAND -h` shows the options of a command, `llamarl --version` the version.")


if __name__ == "__main__":
    script()
