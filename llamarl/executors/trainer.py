"""The trainer executor: collects scored groups, takes optimizer steps, publishes and saves weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from llamarl.algorithms.advantages._base import ValueAdvantage
from llamarl.algorithms.kl import penalty
from llamarl.checkpoint.folder import CRITIC
from llamarl.checkpoint.keeper import MirrorPlace
from llamarl.config import ConfigError, RunConfig, build
from llamarl.distributed.links import Rendezvous
from llamarl.executors.optimizing import OptimizingExecutor
from llamarl.executors.probes import Probes
from llamarl.executors.replies import ControllerState, Published
from llamarl.training.meter import check_memory, device_seconds, peak_flops, peak_memory_bytes, rates, slots_fit
from llamarl.training.packing import shaping
from llamarl.training.result import NonFiniteStep, PolicyStepResult
from llamarl.training.state import training_state
from llamarl.training.trainer import Trainer
from llamarl.types import RolloutGroup
from llamarl.weight_sync.base import Publisher, plan_writers
from llamarl.weight_sync.layout import Address, TensorSpec, lay_out
from llamarl.weight_sync.select import candidates, publisher_class, sample
from llamarl.weight_sync.transports.in_place import is_same_layout


class TrainerExecutor(OptimizingExecutor):
    """Groups arrive with the step that learns from them, or ahead of it where they are large."""

    SPANS: ClassVar[dict[str, str]] = {
        "step": "train",
        "publish": "weight_sync",
        "save": "checkpoint",
        "commit": "checkpoint",
    }

    def __init__(
        self,
        config: RunConfig,
        checkpoint_folder: str,
        resume: bool,
        rendezvous: Rendezvous | None = None,
        mirror: MirrorPlace | None = None,
    ) -> None:
        settings, folder = config.trainer, Path(checkpoint_folder)
        timeout_s = config.cluster.start_timeout_s
        super().__init__("trainer", settings, folder, config.checkpoint, rendezvous, timeout_s, mirror=mirror)
        self._resumed: tuple[ControllerState | None, list[str]] = (None, [])
        with self._mesh.together():
            model, read = self._open_policy(config)
            self._trainer = Trainer(
                model,
                settings,
                loss=build(settings.loss, "llamarl.algorithms.losses", "trainer.loss"),
                advantage=build(settings.advantage, "llamarl.algorithms.advantages", "trainer.advantage"),
                temperature=config.rollout.temperature,
                shaping=shaping(config),
                kl_in_loss=penalty(config.reference, "loss"),
                mesh=self._mesh,
                device=self._device,
                read=read,
            )
            check_memory(model.shape, config, self._device)
            self._slots_fit = slots_fit(model.shape, config, self._device)
            self._built(self._trainer)
            if resume:
                beside = [self._store.substore(CRITIC)] if isinstance(self._trainer.advantage, ValueAdvantage) else []
                self._resumed = self._resume(self._trainer, "controller", beside)
        self._peak_flops = peak_flops(settings, self._device)
        self._weights = self._trainer.sharding.held
        self._background_s = 0.0
        """Processor seconds outside this thread by the last step: messages."""
        self._layouts = list[tuple[TensorSpec, ...]]()
        """Tensors that each rank of a generator wants to receive."""
        self._publishers = dict[str, Publisher]()
        """Publishers by the transports in use."""
        self._sampler: tuple[str, Publisher] | None = None
        """The transport that is being tried, and what publishes by it."""
        self._delta, self._sleeps = config.weight_sync.delta, config.generators_sleep
        self._weights_folder = folder.parent / "weights"
        self._probes = Probes(self._trainer, config)

    def resumed(self) -> tuple[ControllerState | None, list[str]]:
        """The controller's state in the checkpoint that was resumed (None: fresh), and what was found damaged."""
        return self._resumed

    def restore(self, newest: int) -> int:
        """Goes on from the newest state that is left of processes which died with step `newest` done; which step that
        is."""
        return self._restore(self._trainer, newest)

    def step(self, group_ids: Sequence[int], groups: Sequence[RolloutGroup]) -> PolicyStepResult:
        """One optimizer step on the groups of these ids.

        Args:
            groups: scored ones that have not come by `add_groups`, of this step or of later ones.

        Raises:
            NonFiniteStep: loss, gradient or weights are not finite.
        """
        with self._mesh.together(NonFiniteStep):
            self.add_groups(groups)
            taken = self._take(group_ids)
            causes = self._probes.step(taken)
            start_s = device_seconds(self._device)
            result = replace(self._trainer.step(taken), causes=causes)
            result.metrics["mirror_s"] = self._mirrored(self._trainer)
            result.metrics["peak_memory_bytes"] = max(self._mesh.exchange(peak_memory_bytes(self._device)))
        result.metrics["train_s"] = train_s = device_seconds(self._device) - start_s
        result.metrics.update(rates(result.metrics, train_s, self._peak_flops * self._mesh.world.size))
        background_s = time.process_time() - time.thread_time()
        result.metrics["trainer_background_s"], self._background_s = background_s - self._background_s, background_s
        return result

    def outsized(self) -> str:
        """A weight that no learning rate has made so large, and the way out; empty: there is none."""
        return self._trainer.outsized()

    def set_layout(self, rank: int, specs: tuple[TensorSpec, ...]) -> None:
        """Takes the tensors that rank `rank` of every generator wants to receive; called for each rank, in order."""
        self._layouts[rank:] = [specs]  # the first ones may be told again

    def transports(self, same_host: bool, same_process: bool) -> list[str]:
        """Transports that can carry weights to the generators, in the order of preference."""
        in_place = self._sleeps and same_host and self._mesh.world.size == 1 and len(self._layouts) == 1
        in_place = in_place and is_same_layout(self._layouts[0], self._trainer.sharding.specs)
        on_gpu = self._device.type == "cuda"
        names = candidates(same_host, same_process, self._delta, on_gpu=on_gpu, in_place=in_place)
        return [name for name in names if self._slots_fit or not publisher_class(name).ON_DEVICE]

    def publish_sample(self, version: int, transport: str) -> Address:
        """Makes a sample of the weights available by a transport that is being tried. What fails on one rank fails on
        all, and another transport may be tried."""
        try:
            with self._mesh.tried():
                if self._sampler is None or self._sampler[0] != transport:
                    self._end_sample()
                    self._sampler = transport, self._open(transport, [sample(specs) for specs in self._layouts])
                return self._sampler[1].publish(version, self._weights, (version - 1,))
        except BaseException:
            self._end_sample()
            raise

    def _end_sample(self) -> None:
        if self._sampler is not None:
            self._sampler[1].close()
        self._sampler = None

    def choose(self, transport: str, same_host: bool = True) -> None:
        """Weights are published by this transport, too, from now on.

        Raises ConfigError: some who need it are not on the trainer's host, and this transport needs that.
        """
        if publisher_class(transport).NEEDS_SAME_HOST and not same_host:
            raise ConfigError(
                f"`weight_sync.transport = {transport!r}` needs trainer and generators on one host, and some are on "
                "others; use 'auto' or 'p2p'"
            )
        self._end_sample()
        if transport not in self._publishers:
            with self._mesh.together():
                self._publishers[transport] = self._open(transport, self._layouts)

    def _open(self, transport: str, layouts: Sequence[tuple[TensorSpec, ...]]) -> Publisher:
        names = {spec.name for specs in layouts for spec in specs}
        held = [
            spec for name, spec in self._trainer.sharding.specs.items() if name in names or layouts is self._layouts
        ]
        own, everyones = [self._mesh.world.rank], self._mesh.exchange(held)
        (plan,) = plan_writers([lay_out(specs) for specs in layouts], everyones, own)
        publisher = publisher_class(transport)
        plan = replace(plan, rounds=self._trainer.config.dtype == "bfloat16")
        return publisher(plan, self._mesh.exchange, self._weights_folder, delta=self._delta, device=self._device)

    def publish(self, version: int, in_use: tuple[int, ...]) -> Published:
        """Makes the current weights available as `version`, in the generators' types; versions `in_use` stay."""
        with self._mesh.together():
            addresses = {name: one.publish(version, self._weights, in_use) for name, one in self._publishers.items()}
            if self._sleeps:
                self._trainer.rest()
            return Published(version=version, addresses=addresses, probe=self._probes.of(version))

    def close(self) -> None:
        self._end_sample()
        for publisher in self._publishers.values():
            publisher.close()
        super().close()

    def save(self, state: ControllerState) -> Future[dict[str, Any] | OSError]:
        """Copies what a checkpoint needs and writes it beside the next steps; after the answer comes `commit`."""
        return self._save(self._trainer, training_state(self._trainer) | {"controller": state})
