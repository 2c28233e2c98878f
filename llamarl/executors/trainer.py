"""The trainer executor, and the base that it shares with the critic and with supervised training."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from llamarl.algorithms.advantages._base import ValueAdvantage
from llamarl.algorithms.kl import penalty
from llamarl.checkpoint.folder import CRITIC
from llamarl.checkpoint.keeper import MirrorPlace, Place
from llamarl.checkpoint.mirroring import StateMirror, find_mirror
from llamarl.checkpoint.store import CheckpointStore
from llamarl.cluster.api import Executor
from llamarl.cluster.engine_files import mirror_folder
from llamarl.config import ConfigError, RunConfig, build
from llamarl.config.roles import CriticConfig, TrainerConfig
from llamarl.config.schema import CheckpointConfig
from llamarl.distributed.links import Rendezvous
from llamarl.distributed.mesh import join_mesh, set_up_device
from llamarl.executors.replies import ControllerState, Probes, Published
from llamarl.kernels import build as kernel_build
from llamarl.kernels import fused, half, products
from llamarl.models.hf import open_model
from llamarl.models.lora import add_adapters
from llamarl.models.memory import MOMENTS_BYTES
from llamarl.models.transformer import Transformer
from llamarl.observability.notes import note
from llamarl.training.meter import check_memory, device_seconds, peak_flops, peak_memory_bytes, rates, slots_fit
from llamarl.training.optimization import Optimization
from llamarl.training.packing import shaping
from llamarl.training.parallel import Read
from llamarl.training.policy import uses_halves
from llamarl.training.preflight import check_layout
from llamarl.training.result import NonFiniteStep, PolicyStepResult
from llamarl.training.state import StateMismatch, load_training_state, training_state
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import RolloutGroup
from llamarl.weight_sync.base import Publisher, plan_writers
from llamarl.weight_sync.layout import Address, TensorSpec, lay_out
from llamarl.weight_sync.select import candidates, publisher_class, sample
from llamarl.weight_sync.transports.in_place import is_same_layout


class OptimizingExecutor(Executor):
    """Base of executors with an optimizer. All ranks get all calls and all groups, each computes its share, and rank 0
    answers.

    Groups arrive as they are scored. Checkpoints and mirrors of the state belong to this class.
    """

    SHARES_CALLS: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        settings: TrainerConfig | CriticConfig,
        checkpoints: Path,
        saving: CheckpointConfig,
        rendezvous: Rendezvous | None,
        start_timeout_s: float,
        *,
        mirror: MirrorPlace | None = None,
    ) -> None:
        """
        Args:
            name: section of the settings.
            rendezvous: meeting point of several ranks. None means one rank.
            mirror: where copies of the state in memory are kept. None means no copies.
        """
        self._device = set_up_device(settings.device, settings.threads, f"{name}.device")
        kernel_build.keep_choices_in((checkpoints.parent if name == CRITIC else checkpoints).parent / "kernels")
        sizes = settings.parallelism.model_dump()
        self._mesh = join_mesh(sizes, rendezvous, self._device, start_timeout_s=start_timeout_s)
        self._groups = dict[int, RolloutGroup]()
        world = self._mesh.world
        self._store = CheckpointStore(
            checkpoints, saving.keep, world.rank, world.size, self._mesh.exchange, saving.keep_every
        )
        self._mirror: StateMirror | None = None
        if mirror:
            folder = mirror_folder(mirror.run) / name
            with self._mesh.together():
                self._mirror = find_mirror()(folder, world.rank, world.size, self._mesh.exchange, mirror.keepers)

    def _built(self, optimization: Optimization[Any]) -> None:
        """Logs which kernels multiply. Raises ConfigError if there is no memory for a mirror of weights and AdamW
        moments."""
        has_delta = optimization.model.shape.delta is not None
        if uses_halves(optimization.config, optimization.device):
            said = half.describe(optimization.device, has_delta)
        elif said := products.describe():
            said += f"\n{fused.describe(has_delta)}"
        if said:
            note(said)
        if self._mirror:
            each = MOMENTS_BYTES[optimization.config.moments]
            held = [tensor for _, tensor in optimization.shards().values()]
            self._mirror.check_space(int(sum(tensor.nbytes + each * tensor.numel() for tensor in held)))

    def work(self) -> bool:
        """Raises RanksLost if ranks are lost: the current call of all ranks might never end."""
        self._mesh.check()
        return False

    def whole(self, parts: Mapping[int, bytes], owners: Sequence[int], num_bytes: int) -> memoryview:
        with self._mesh.together():
            return self._mesh.gathered(parts, owners, num_bytes)

    def close(self) -> None:
        self._mesh.close()

    def add_groups(self, groups: Iterable[RolloutGroup]) -> None:
        """Keeps scored groups, or parts of large ones, for a later step."""
        for group in groups:
            held = self._groups.get(group.group_id)
            self._groups[group.group_id] = group if held is None else held.with_more(group)

    def choose_keepers(self, keepers: Sequence[Place]) -> None:
        """Sets other hosts that may keep copies of the state."""
        if self._mirror:
            with self._mesh.together():
                self._mirror.choose_keepers(keepers)

    def commit(self) -> Future[str] | None:
        """Makes the last saved state the newest checkpoint. Returns its folder. Raises OSError if the disk is full."""
        with self._mesh.together(OSError):
            return self._store.commit()

    def _open_policy(self, config: RunConfig) -> tuple[Transformer, Read]:
        """Returns the model to train, with adapters and without memory, and the reader of its weights. Logs that the
        layout is correct.

        Raises:
            ConfigError: the layout is wrong, or the model cannot be read.
        """
        torch.manual_seed(config.seed)
        model, weights = open_model(config.model.path)
        if lora := config.trainer.lora:
            add_adapters(model, lora, config.seed, getattr(torch, config.trainer.dtype))
        if self._mesh.world.size > 1:
            sys.stdout.write(f"{check_layout(model.shape, self._mesh, self._device, lora)}\n")
        return model, weights.read

    def _resume(
        self, optimization: Optimization[Any], kind: str, beside: Sequence[CheckpointStore] = ()
    ) -> tuple[Any, list[str]]:
        """Loads the newest valid checkpoint. Returns its state of this `kind`, and damaged files. None means that there
        is no checkpoint.

        Raises:
            ConfigError: the checkpoint belongs to another model or another command.
        """
        checkpoint, damaged = self._store.load_newest(beside)
        if checkpoint is None:
            return None, damaged
        if kind not in checkpoint.state:
            raise ConfigError(f"--resume: {checkpoint.folder} belongs to another command; resume with that command")
        try:
            load_training_state(optimization, checkpoint.shapes, checkpoint.read, checkpoint.state)
        except StateMismatch as error:
            raise ConfigError(f"--resume: {error}") from None
        return checkpoint.state[kind], damaged

    def _restore(self, optimization: Optimization[Any], newest: int) -> int:
        """Loads the newest state of earlier processes, from mirror or checkpoints, up to step `newest`. Returns its
        step."""
        with self._mesh.together(StateMismatch):
            state = self._mirror.load(newest) if self._mirror else None
            saved = self._store.load_newest(newest=newest)[0] if state is None or state.step < newest else None
            if saved is not None and (state is None or saved.step > state.step):
                load_training_state(optimization, saved.shapes, saved.read, saved.state)
            elif state is not None:
                load_training_state(optimization, state.shapes, state.read, state.state)
            return optimization.policy_version

    def _mirrored(self, optimization: Optimization[Any]) -> float:
        """Mirrors the state after a step. Returns the seconds that it took."""
        start_s = time.perf_counter()
        if self._mirror:
            self._mirror.save(optimization.policy_version, optimization.shards(), training_state(optimization))
        return time.perf_counter() - start_s

    def _take(self, group_ids: Sequence[int]) -> list[RolloutGroup]:
        return [self._groups.pop(group_id) for group_id in group_ids]

    def _save(self, optimization: Optimization[Any], state: dict[str, Any]) -> Future[dict[str, Any] | OSError]:
        """Copies the state of a checkpoint, and writes it during later calls. `commit` follows the reply."""
        with self._mesh.together():
            return self._store.save(optimization.policy_version, optimization.shards(), state)


class TrainerExecutor(OptimizingExecutor):
    """The trainer. Groups arrive with the step that trains on them, or before it if they are large."""

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
        timeout_s = config.cluster.timeout_s
        super().__init__("trainer", settings, folder, config.checkpoint, rendezvous, timeout_s, mirror=mirror)
        self._resumed: tuple[ControllerState | None, list[str]] = (None, [])
        with self._mesh.together():
            model, read = self._open_policy(config)
            self._trainer = Trainer(
                model,
                settings,
                Objective(
                    loss=build(settings.loss, "llamarl.algorithms.losses", "trainer.loss"),
                    advantage=build(settings.advantage, "llamarl.algorithms.advantages", "trainer.advantage"),
                    temperature=config.rollout.temperature,
                    shaping=shaping(config),
                    kl_in_loss=penalty(config.reference, "loss"),
                ),
                mesh=self._mesh,
                device=self._device,
                read=read,
            )
            check_memory(model.shape, config, self._device)
            self._slots_fit = slots_fit(model.shape, config, self._device)
            self._built(self._trainer)
            if resume:
                has_critic = isinstance(self._trainer.objective.advantage, ValueAdvantage)
                beside = [self._store.substore(CRITIC)] if has_critic else []
                self._resumed = self._resume(self._trainer, "controller", beside)
        self._peak_flops = peak_flops(settings, self._device)
        self._weights = self._trainer.sharding.held
        self._background_s = 0.0
        """Processor seconds of other threads (messages) up to the last step."""
        self._layouts = list[tuple[TensorSpec, ...]]()
        """Tensors that each rank of a generator receives."""
        self._publishers = dict[str, Publisher]()
        """Publishers by transport in use."""
        self._sampler: tuple[str, Publisher] | None = None
        """The transport that is being measured, and its publisher."""
        self._delta, self._sleeps = config.weight_sync.delta, config.generators_sleep
        self._weights_folder = folder.parent / "weights"
        self._probes = Probes(self._trainer, config)

    def resumed(self) -> tuple[ControllerState | None, list[str]]:
        """Returns the controller's state in the loaded checkpoint (None means a new run), and damaged files."""
        return self._resumed

    def restore(self, newest: int) -> int:
        """Loads the newest state that dead processes left, after step `newest` was done. Returns its step."""
        return self._restore(self._trainer, newest)

    def step(self, group_ids: Sequence[int], groups: Sequence[RolloutGroup]) -> PolicyStepResult:
        """Takes an optimizer step on the groups with these ids.

        Args:
            groups: scored groups of this step, or of later ones, that did not come by `add_groups`.

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
        """Returns a message with a fix about a weight that is too large for any learning rate. Empty means that there
        is none."""
        return self._trainer.outsized()

    def set_layout(self, rank: int, specs: tuple[TensorSpec, ...]) -> None:
        """Sets the tensors that rank `rank` of every generator receives. Called for each rank, in order."""
        self._layouts[rank:] = [specs]  # a restarted generator sets them again

    def transports(self, same_host: bool, same_process: bool) -> list[str]:
        """Returns the transports that can carry weights to the generators, the preferred one first."""
        in_place = self._sleeps and same_host and self._mesh.world.size == 1 and len(self._layouts) == 1
        in_place = in_place and is_same_layout(self._layouts[0], self._trainer.sharding.specs)
        on_gpu = self._device.type == "cuda"
        names = candidates(same_host, same_process, self._delta, on_gpu=on_gpu, in_place=in_place)
        return [name for name in names if self._slots_fit or not publisher_class(name).ON_DEVICE]

    def publish_sample(self, version: int, transport: str) -> Address:
        """Publishes a sample of the weights by a transport that is being measured. A failure on one rank is a failure
        on all, and another transport may follow."""
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
        """Publishes weights by this transport, too, from now on.

        Raises ConfigError: the transport needs all generators on the trainer's host, and some are elsewhere.
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
        """Publishes the current weights as `version`, in the generators' types. Versions `in_use` are kept."""
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
        """Copies the state of a checkpoint, and writes it during later steps. `commit` follows the reply."""
        return self._save(self._trainer, training_state(self._trainer) | {"controller": state})
