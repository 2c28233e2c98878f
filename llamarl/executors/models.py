"""Executors of the other models: reference model, reward model and critic."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from llamarl.batches import batches
from llamarl.checkpoint.folder import CRITIC
from llamarl.checkpoint.keeper import MirrorPlace
from llamarl.cluster.api import Executor
from llamarl.config import RunConfig, build
from llamarl.config.roles import REWARD_MODEL_TOKENS
from llamarl.data.tokenizer import TOKENIZER_FILE, Tokenizer
from llamarl.distributed.links import Rendezvous
from llamarl.distributed.mesh import set_up_device
from llamarl.executors.trainer import OptimizingExecutor
from llamarl.generation.model import GeneratorModel, load_generator_model
from llamarl.generation.sampler import logprobs_of
from llamarl.models.attention import causal_attend
from llamarl.models.scalar import load_scalar_model, open_scalar_model
from llamarl.rewards._base import MAX_REWARD, invalid
from llamarl.training.critic import Critic, ValueObjective
from llamarl.training.meter import device_seconds
from llamarl.training.packing import Microbatch, sequences_of, shaping
from llamarl.training.preflight import check_critic_layout
from llamarl.training.responses import hidden_of, per_response
from llamarl.training.result import NonFiniteStep, StepResult
from llamarl.training.state import load_training_state, training_state
from llamarl.types import Outcome, Prompt, RewardResult, Rollout


class ReferenceExecutor(Executor):
    """The reference model: the initial policy, or another model with its vocabulary, such as a teacher. A source may
    have its own. They never change, so resumed runs have the same reference."""

    SPANS: ClassVar[dict[str, str]] = {"score": "score"}

    def __init__(self, config: RunConfig) -> None:
        settings = config.reference
        self._device = set_up_device(settings.device, settings.threads, "reference.device")
        of_path = {
            path: load_generator_model(path, settings.dtype, self._device, tokens_of=config.model.path)
            for path in dict.fromkeys(config.references.values())
        }
        self._models = {source: of_path[path] for source, path in config.references.items()}
        """Models by `Prompt.source`. The empty name has that of all other prompts."""
        self._max_tokens = config.trainer.microbatch_tokens
        self._temperature = config.rollout.temperature

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[list[np.ndarray]]:
        """Returns the log-probability of each response token at the sampling temperature, float32 [T] per rollout by
        group."""
        return [self._of_group(group) for group in groups]

    def _of_group(self, group: tuple[Prompt, Sequence[Rollout]]) -> list[np.ndarray]:
        model = self._models.get(group[0].source) or self._models[""]
        compute = partial(self._logprobs, model)
        return per_response([group], self._max_tokens, lambda microbatches: map(compute, microbatches))[0]

    @torch.inference_mode()
    def _logprobs(self, model: GeneratorModel, microbatch: Microbatch) -> np.ndarray:
        hidden_R_D = hidden_of(model, microbatch, self._device)
        targets_R = torch.from_numpy(microbatch.targets_R).to(self._device, non_blocking=True)
        return logprobs_of(model, hidden_R_D, targets_R, self._temperature).cpu().numpy()


class RewardModelExecutor(Executor):
    """The reward model: reads prompt and response, and scores them with one number at the last token.

    With the policy's tokenizer, it reads the sampled tokens, including the stop token. Otherwise it reads their text
    with its own tokenizer. For an agent's episode it reads the longest sequence, or the last one of equal length.
    """

    SPANS: ClassVar[dict[str, str]] = {"score": "score"}

    def __init__(self, config: RunConfig) -> None:
        settings = config.reward.model
        assert settings is not None
        self._device = set_up_device(settings.device, settings.threads, "reward.model.device")
        dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
        self._model = load_scalar_model(settings.path, dtype, self._device, new_head=False).eval()
        self._policys, self._own = Tokenizer(config.model.path), Tokenizer(settings.path)
        files = [one.folder / TOKENIZER_FILE for one in (self._policys, self._own)]
        self._has_policys_tokens = files[0].read_bytes() == files[1].read_bytes()

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[list[RewardResult]]:
        """Returns one list per group with one result per rollout."""
        return [self._score([self._tokens(prompt, one) for one in rollouts]) for prompt, rollouts in groups]

    def _tokens(self, prompt: Prompt, rollout: Rollout) -> np.ndarray:
        if "sequence" in rollout.columns:
            ids_T = max((one["token_ids"] for one in reversed(sequences_of(rollout.columns))), key=len)
            return ids_T if self._has_policys_tokens else self._own.encode(self._policys.decode(ids_T))
        if self._has_policys_tokens:
            return np.concatenate([prompt.token_ids_T, rollout.token_ids_T])
        return self._own.encode(prompt.text + self._policys.decode(rollout.token_ids_T))

    def _score(self, sequences: Sequence[np.ndarray]) -> list[RewardResult]:
        """Scores one group by itself, so that results do not depend on other groups to the bit."""
        longest = self._model.shape.max_position_embeddings
        results = [
            invalid(f"{len(ids_T)} tokens, and the reward model reads 1 to {longest}") for ids_T in sequences
        ]  # fmt: skip
        readable = [index for index, ids_T in enumerate(sequences) if 0 < len(ids_T) <= longest]
        packs = batches((sequences[index] for index in readable), len, REWARD_MODEL_TOKENS)
        for index, score in zip(readable, chain.from_iterable(map(self._forward, packs)), strict=True):
            answer = RewardResult(outcome=Outcome.SCORE, value=score)
            results[index] = answer if abs(score) <= MAX_REWARD else invalid(f"the reward model returned {score}")
        return results

    @torch.inference_mode()
    def _forward(self, sequences: Sequence[np.ndarray]) -> list[float]:
        lengths = [len(ids_T) for ids_T in sequences]
        ids_N, positions_N, last = (
            torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(self._device, non_blocking=True)
            for parts in (sequences, [np.arange(length) for length in lengths], [np.cumsum(lengths) - 1])
        )
        hidden_N_D = self._model(ids_N, positions_N, causal_attend(lengths))
        return self._model.scalars(hidden_N_D[last]).tolist()


class CriticExecutor(OptimizingExecutor):
    """The critic: trains one microbatch per call, and values new rollouts in between with the weights of the last
    finished step. The order of calls decides, not the time, so several ranks do the same.

    Without staleness, a step finishes before rollouts are valued, so that results do not depend on the order of calls.
    """

    SPANS: ClassVar[dict[str, str]] = {
        "score": "score",
        "learn_on": "train",
        "save": "checkpoint",
        "commit": "checkpoint",
    }

    def __init__(
        self,
        config: RunConfig,
        checkpoint_folder: str,
        rendezvous: Rendezvous | None = None,
        mirror: MirrorPlace | None = None,
    ) -> None:
        """
        Args:
            checkpoint_folder: folder of the run's checkpoints. The critic's are in a subfolder.
        """
        settings, folder = config.critic, Path(checkpoint_folder, CRITIC)
        # The critic saves before the trainer, so the trainer may not have its newest checkpoint yet.
        saving = config.checkpoint.model_copy(update={"keep": config.checkpoint.keep + 1})
        timeout_s = config.cluster.timeout_s
        super().__init__("critic", settings, folder, saving, rendezvous, timeout_s, mirror=mirror)
        with self._mesh.together():
            model, weights = open_scalar_model(settings.path or config.model.path, new_head=True)
            if self._mesh.world.size > 1:
                sys.stdout.write(f"{check_critic_layout(model.shape, self._mesh, self._device)}\n")
            rate = settings.learning_rate_scale * config.trainer.learning_rate
            self._critic = Critic(
                model,
                config.trainer.model_copy(update={"learning_rate": rate}),
                ValueObjective(
                    clip=settings.clip,
                    advantage=build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage"),
                    shaping=shaping(config),
                ),
                mesh=self._mesh,
                device=self._device,
                read=weights.read,
            )
            self._built(self._critic)
        self._is_synchronous = config.rollout.max_staleness == 0
        self._learning = deque[tuple[int, Generator[None, None, StepResult]]]()
        """Steps in progress, the oldest first."""
        self._learnt = dict[int, StepResult]()
        """Finished steps whose results have not been fetched yet."""
        self._seconds = 0.0
        """Seconds of work on the oldest step."""

    def score(self, groups: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> list[list[np.ndarray]]:
        """Returns the value before each response token, float32 [T] per rollout by group."""
        with self._mesh.together(NonFiniteStep):
            if self._is_synchronous:
                self._finish()
            return self._critic.values(groups)

    def learn(self, step: int, group_ids: Sequence[int]) -> None:
        """Prepares an optimizer step on these groups. Calls of `learn_on` run it."""
        self._learning.append((step, self._critic.learn(self._take(group_ids))))

    def learn_on(self, step: int) -> StepResult | None:
        """Trains one more microbatch of the oldest step in progress. Returns the metrics of `step` once it is done,
        else None.

        Raises:
            NonFiniteStep: as `Critic.learn`.
        """
        if step not in self._learnt:
            with self._mesh.together(NonFiniteStep):
                self._advance()
        return self._learnt.pop(step, None)

    def _advance(self) -> None:
        step, pieces = self._learning[0]
        start_s = device_seconds(self._device)
        try:
            next(pieces)
        except StopIteration as end:
            self._learning.popleft()
            self._learnt[step] = end.value
            self._mirrored(self._critic)
        self._seconds += device_seconds(self._device) - start_s
        if step in self._learnt:
            self._learnt[step].metrics["critic_s"], self._seconds = self._seconds, 0.0

    def _finish(self) -> None:
        while self._learning:
            self._advance()

    def save(self, step: int) -> Future[dict[str, Any] | OSError]:
        """Finishes the step, copies the state of a checkpoint and writes it. `commit` follows the reply."""
        with self._mesh.together(NonFiniteStep):
            self._finish()
        assert self._critic.policy_version == step, "critic and trainer take the same steps"
        return self._save(self._critic, training_state(self._critic))

    def resume(self, step: int) -> None:
        """Loads the checkpoint of a step, which the trainer has found to be complete."""
        with self._mesh.together():
            checkpoint = self._store.load(step)
            load_training_state(self._critic, checkpoint.shapes, checkpoint.read, checkpoint.state)

    def restore(self, newest: int) -> int:
        """Loads the newest state that dead processes left, up to step `newest`. Returns its step."""
        return self._restore(self._critic, newest)
