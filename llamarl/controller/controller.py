"""The objects of an asynchronous run, in the order in which data meets them.

::

    prompts -> [1 admission: at most (S+1)*P groups active] -> generators -> [2 collect] -> [3 score] -> ready window
                   ^                                             ^    |    (reward, models)                |
                   |                                             +----+                                    v
                   |                                     parked rollouts go on                      [4 train, critic]
                   |                                                                                       |
                   +--- slots freed when a version is made;    [6 adopt, one per generator] <- [5 sync] <- publish

Each loop is in the file of its object: 1 `admission.py`, 2 `collector.py`, 3 `scoring.py`, 4 `train_loop.py`, 5 and 6
`weights.py`. Every loop's docstring says what it consumes, waits for, produces, and what unblocks it; docs/index.md
lists them, and those of other files, too. `run/assembly.py` builds the objects. With S = 0 all slots are taken until
the weights trained on them are made, and what follows waits for these at its generator, so generation and training take
turns: the synchronous mode is this same code. Without a trainer it evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.controller.admission import Admission
from llamarl.controller.collector import Collector, ScoreLoop
from llamarl.controller.evaluation import EvalResult, Evaluations, HeldOutSet
from llamarl.controller.flight import Flight, Replicas
from llamarl.controller.ports import Executors, Turns
from llamarl.controller.recovery import Recovery
from llamarl.controller.supervision import StallWatch, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.controller.train_loop import TrainLoop
from llamarl.controller.weights import WeightSync
from llamarl.journal.writer import Journal


@dataclass(frozen=True, kw_only=True, slots=True)
class Controller:
    """Orders the executors; never touches a tensor."""

    executors: Executors
    """Executors of the run; one that is started again when it dies is a `RestartableHandle`."""
    admission: Admission
    flight: Flight
    replicas: Replicas
    turns: Turns | None
    """None: a response is one turn."""
    collector: Collector
    scoring: ScoreLoop
    evaluations: Evaluations
    held_out: Sequence[HeldOutSet]
    """Sets that the run is evaluated on."""
    weights: WeightSync | None
    """None: nothing is trained."""
    training: TrainLoop | None
    """None: nothing is trained."""
    recovery: Recovery
    supervisor: Supervisor
    watch: StallWatch
    telemetry: Telemetry
    journal: Journal

    @property
    def version(self) -> int:
        """Completed optimizer steps."""
        return self.training.version if self.training else 0

    async def start(self) -> None:
        """Brings the generators to the trainer's version and starts the background loops."""
        replicas = list(self.replicas.alive)
        for replica in replicas:
            self.recovery.watch(replica)
        if self.weights:
            await self.weights.begin()
        self.watch.progress()
        for replica in replicas:
            self.collector.follow(replica)
        self.supervisor.start(self.scoring.loop(), "score")
        if self.turns:
            self.supervisor.start(self.turns.loop(), "episodes")
        self.supervisor.start(self.watch.loop(self._who_waits), "stall watch")
        self.supervisor.start(self.recovery.silence_loop(), "silence watch")

    async def evaluate(self) -> list[EvalResult]:
        """Answers the prompts of all held-out sets, with the generators' current weights."""
        return await self.evaluations.run(self.held_out, self.version)

    async def train(self) -> None:
        """Runs to `config.steps`."""
        assert self.training, "there is no trainer"
        admission = self.admission.loop(self.journal, self.collector.ask, self.scoring.deliver)
        admitted = self.supervisor.start(admission, "admission")
        await self.training.run()
        await admitted

    async def _who_waits(self) -> str:
        """Text for the stall report: what everybody is doing."""
        buffer = self.admission.buffer
        in_flight = f"{self.flight.describe()}, {buffer.num_free} slots are free"
        facts = [f"step {self.version + 1} {buffer.describe()}", in_flight]
        if self.turns and (wait := self.turns.describe()):
            facts.append(wait)
        return "; ".join([*facts, *self.replicas.debts(), *(await self.telemetry.describe_executors())])
