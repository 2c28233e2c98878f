"""All objects and loops of an asynchronous run, in the order in which data meets them.

::

    prompts -> [1 admission: at most (S+1)*P groups active] -> generators -> [2 collect] -> [3 score] -> ready window
                   ^                                             ^    |    (reward, models)                |
                   |                                             +----+                                    v
                   |                                   parked rollouts continue                    [4 train, critic]
                   |                                                                                       |
                   +--- slots freed when a version is made;    [6 adopt, one per generator] <- [5 sync] <- publish

| loop | method | file |
|---|---|---|
| 1 admission | `Admission.loop` | `admission.py` |
| 2 collect, one per generator | `Collector._collect_loop` | `collector.py` |
| 3 score | `ScoreLoop.loop` | `collector.py` |
| 4 train | `TrainLoop.run` | `train_loop.py` |
| 5 sync, one task per version | `WeightSync.sync` | `weights.py` |
| 6 adopt, one per generator | `WeightSync.adoption_loop` | `weights.py` |

The docstring of a loop says what it consumes, what it waits for, what it produces, and what unblocks it.
`build_controller` creates the objects, and `Controller.start` and `Controller.train` start the loops. A run with S = 0
is synchronous: all slots are taken until the weights trained on their groups are made. Later requests wait for these
weights, so generation and training take turns. A run without a trainer only evaluates.

To add a loss, an advantage, a reward or a transport, write one file in `llamarl/algorithms/losses`,
`llamarl/algorithms/advantages`, `llamarl/rewards` or `llamarl/weight_sync/transports`. Nothing here changes: the loops
call executors through the methods of `ports.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.config import RunConfig
from llamarl.controller.admission import Admission, Problems
from llamarl.controller.collector import Collector, ScoreLoop, Scorers
from llamarl.controller.evaluation import EvalResult, Evaluations
from llamarl.controller.flight import Flight, Replicas
from llamarl.controller.ports import Executors, Turns, open_turns
from llamarl.controller.recovery import Recovery, ReplicaLoops, policy_of_generators
from llamarl.controller.restart import RestartBudget, with_restarts
from llamarl.controller.services import Services
from llamarl.controller.train_loop import TrainedExecutors, TrainLoop
from llamarl.controller.weights import WeightSync
from llamarl.executors.replies import ControllerState


@dataclass(frozen=True, kw_only=True, slots=True)
class Controller:
    """The objects of a run. They call executors, and never touch a tensor.

    Example::

        controller = build_controller(config, problems, executors, services, state=None)
        await controller.start()                # generators serve the trainer's weights; background loops run
        before = await controller.evaluate()
        await controller.train()                # to config.steps
    """

    executors: Executors
    """Executors of the run. One that is restarted when it dies has a `RestartableHandle`."""
    admission: Admission
    flight: Flight
    replicas: Replicas
    turns: Turns | None
    """None means that each response is one turn."""
    collector: Collector
    scoring: ScoreLoop
    evaluations: Evaluations
    weights: WeightSync | None
    """None means that nothing is trained."""
    training: TrainLoop | None
    """None means that nothing is trained."""
    recovery: Recovery
    services: Services

    @property
    def version(self) -> int:
        """Completed optimizer steps."""
        return self.services.progress.trained

    async def start(self) -> None:
        """Brings the generators to the trainer's version, and starts the loops that serve training and evaluation."""
        supervisor, watch, replicas = self.services.supervisor, self.services.watch, list(self.replicas.alive)
        for replica in replicas:
            self.recovery.watch(replica)
        if self.weights:
            await self.weights.begin()  # starts loop 6 for each generator, and runs the first sync
        watch.progress()
        for replica in replicas:
            self.collector.follow(replica)  # starts loop 2
        supervisor.start(self.scoring.loop(), "score")  # loop 3
        if self.turns:
            supervisor.start(self.turns.loop(), "episodes")
        supervisor.start(watch.loop(self._describe), "stall watch")
        supervisor.start(self.recovery.silence_loop(), "silence watch")

    async def train(self) -> None:
        """Runs to `config.steps`."""
        assert self.training, "there is no trainer"
        admission = self.admission.loop(self.services.journal, self.collector.ask, self.scoring.deliver)
        admitted = self.services.supervisor.start(admission, "admission")  # loop 1
        await self.training.run()  # loop 4, which starts a sync (loop 5) after each step
        await admitted

    async def evaluate(self) -> list[EvalResult]:
        """Evaluates all held-out sets with the generators' current weights."""
        return await self.evaluations.run(self.evaluations.sets, self.version)

    async def _describe(self) -> str:
        """Returns text for the stall report: what each object waits for."""
        buffer = self.admission.buffer
        in_flight = f"{self.flight.describe()}, {buffer.num_free} slots are free"
        facts = [f"step {self.version + 1} {buffer.describe()}", in_flight]
        if self.turns and (waiting := self.turns.describe()):
            facts.append(waiting)
        return "; ".join([*facts, *self.replicas.describe(), *(await self.services.telemetry.describe_executors())])


def build_controller(
    config: RunConfig,
    problems: Problems,
    executors: Executors,
    services: Services,
    state: ControllerState | None,
) -> Controller:
    """Creates the objects of a run, each from the ones that it calls. Raises ConfigError.

    Args:
        services: with the progress of a run that has `state`.
        state: of the checkpoint to resume from; None means that the run starts.
    """
    timeout_s, supervisor, telemetry = config.cluster.timeout_s, services.supervisor, services.telemetry
    budget = RestartBudget(config.cluster, len(executors.generators), telemetry.warn)
    executors = with_restarts(executors, config.cluster, supervisor, budget)
    policy = policy_of_generators(config.cluster, executors)

    # 1 and 2: prompts to rollouts.
    admission = Admission(config, problems, state, telemetry.flow, services.progress)
    flight = Flight(config, services.journal, admission.mark_generated)
    replicas = Replicas(
        executors.generators, flight, supervisor, services.progress, timeout_s, survives_deaths=policy != "stop"
    )
    turns = open_turns(config, executors, supervisor, flight, replicas, telemetry.waited)
    collector = Collector(flight, replicas, turns, admission.buffer if executors.trainer else None, services)
    evaluations = Evaluations(problems.eval, admission.sampling, collector.ask, telemetry)

    # 4, 5 and 6: groups to weights, and weights to generators.
    trained = weights = training = None
    if executors.trainer:
        trained = TrainedExecutors(config, executors, services)
        weights = WeightSync(config, executors.trainer, replicas, services)
        trained.on_trainer_restart(weights.trainer_died, weights.trainer_restarted)
        training = TrainLoop(config, admission, trained, weights, evaluations, services)

    # 3: rollouts to scored groups, for the trainer or an evaluation.
    scorers = Scorers(executors.reward, executors.models, config.reward.model, timeout_s)
    scoring = ScoreLoop(scorers, flight, admission, trained, evaluations.add, services)

    loops = ReplicaLoops(adopt=weights.adoption_loop if weights else None, collect=collector.follow)
    recovery = Recovery(policy, executors, replicas, loops, budget, services)
    return Controller(
        executors=executors, admission=admission, flight=flight, replicas=replicas, turns=turns, collector=collector,
        scoring=scoring, evaluations=evaluations, weights=weights, training=training, recovery=recovery,
        services=services,
    )  # fmt: skip
