"""`Services`: what every object of the controller uses, passed to each of them as one argument."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamarl.controller.progress import Progress
from llamarl.controller.supervision import StallWatch, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.journal.writer import Journal


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """Supervision, telemetry, journal and progress of one run.

    Example::

        services = Services(supervisor=Supervisor(), telemetry=telemetry, watch=StallWatch(600), journal=Journal())
        services.supervisor.start(loop(), "my loop")    # an exception in it ends the run
        services.watch.progress()                       # something finished, so the run has not stalled
        services.telemetry.warn("shown now and in the summary")
    """

    supervisor: Supervisor
    telemetry: Telemetry
    watch: StallWatch
    journal: Journal
    progress: Progress = field(default_factory=Progress)
