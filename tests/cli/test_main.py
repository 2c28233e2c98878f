"""How a command ends that a signal ends."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from llamarl.cli import doctor
from llamarl.cli.main import main


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_named(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it comes, also before a run has begun to listen to signals itself."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(sys, "argv", ["llamarl", "doctor"])
    monkeypatch.setattr(doctor, "main", lambda _: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as ended:
        main()
    for one, handler in before.items():
        signal.signal(one, handler)
    assert (ended.value.code, capsys.readouterr().err) == (130, f"llamarl doctor: ended by {number.name}\n")
