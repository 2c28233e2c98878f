"""Every setting of a run, with its unit, its default and the reason for it. Frozen after validation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from llamarl.config.cluster import ClusterConfig, use_processes
from llamarl.config.data import MIN_TEMPERATURE, DataConfig, EvalConfig, EvalSet, SourceConfig, with_tools
from llamarl.config.device import Device
from llamarl.config.launch import LaunchConfig
from llamarl.config.metrics import MetricsConfig, RecordConfig
from llamarl.config.path import FilePath
from llamarl.config.ref import Ref
from llamarl.config.roles import AgentConfig, CriticConfig, ReferenceConfig, RewardModelConfig, RewardParts
from llamarl.config.section import Section
from llamarl.config.trainer import TrainerConfig


class ModelConfig(Section):
    path: FilePath
    """Hugging Face folder (`config.json`, `model.safetensors`, `tokenizer.json`), a name of the Hub: `owner/name`,
    `owner/name@revision`, or a run folder: its newest checkpoint."""
    warm_start: FilePath = ""
    """An SFT TOML that makes `path` when it is missing (relative to this file); empty: `path` must exist."""
    adapter: FilePath = ""
    """Folder of a LoRA adapter in PEFT's format, merged into `path` before the run starts; empty: none."""


def staleness_limit(max_staleness: int, prompts_per_step: int, window: int) -> int:
    """L = S + ceil((W - 1) / P): optimizer steps between a token and the step that learns from it, at most.

    `docs/staleness.md` has the proof. 0 for S = 0, as a step then takes all groups that are active.
    """
    return max_staleness + -(-(window - 1) // prompts_per_step) if max_staleness else 0


class RolloutConfig(Section):
    prompts_per_step: int = Field(default=16, ge=1, le=1 << 20)
    """P: groups that one optimizer step consumes."""
    group_size: int = Field(default=8, ge=1, le=1 << 16)
    """G: attempts per prompt."""
    max_staleness: int = Field(default=1, ge=0)
    """S, in optimizer steps: at most (S + 1) * P groups are active. 0 is exactly synchronous."""
    window: int = Field(default=1, ge=1)
    """W, in groups: up to W - 1 younger groups may pass a slow one; staleness is then at most S + ceil((W - 1) / P)."""
    max_active: int = Field(default=0, ge=0)
    """Groups in flight at once; 0: (S + 1) * P. Up to (L + 1) * P - (W - 1), L being the bound of staleness, more keep
    generators busier, and make tokens older on average but never older than the bound."""
    max_attempts: int = Field(default=1, ge=1)
    """Groups generated per group that is trained on, at most: one whose rewards are all equal teaches nothing and is
    replaced by another prompt (dynamic sampling, DAPO). A step that has tried this many takes what is there; 1: no
    replacements."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response, in tokens, over all its segments."""
    segment_tokens: int = Field(default=0, ge=0)
    """A response is parked after so many new tokens and goes on wherever most is free; 0: never. Short segments balance
    the generators and lose less with one that dies; each costs a prefill of what came before."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """A response also ends with the token that completes one of these in its text."""
    environment: Ref | None = None
    """Environment that answers the policy between its turns: a file in `environments/`, or `package.module:Class`;
    none: a response is one turn. Observed tokens count towards `max_new_tokens`, and nobody learns to write them."""
    tools: list[str] = Field(default_factory=list)
    """Python functions that the policy may call, `package.module:function` each: they are an environment, and the chat
    template tells the policy of them."""
    agent: Annotated[
        AgentConfig | None,
        BeforeValidator(
            lambda value: {"name": value} if isinstance(value, str) else value,
            json_schema_input_type=AgentConfig | str | None,
        ),
    ] = None
    """A program that has the policy work over OpenAI's protocol and says what its work is worth: `package.module:run`;
    `max_new_tokens` then bounds what an episode samples, and each of its sequences after the first prompt."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=100)
    """Divides the logits when sampling; the trainer uses the same."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off, which keeps importance ratios exact."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens below this share of the most likely one; 0 is off."""

    @model_validator(mode="before")
    @classmethod
    def _tools_are_an_environment(cls, values: Any) -> Any:
        return with_tools(values, "rollout.")

    @model_validator(mode="after")
    def _combinations(self) -> RolloutConfig:
        active = (self.max_staleness + 1) * self.prompts_per_step
        if self.window > active:
            raise ValueError(
                f"rollout.window = {self.window} is larger than the {active} groups that can be active "
                f"((max_staleness + 1) * prompts_per_step); lower the window or raise max_staleness"
            )
        limit, per_step = self.staleness_limit, self.prompts_per_step
        most = (limit + 1) * per_step - (self.window - 1) if limit else per_step
        if self.max_active and not max(per_step, self.window) <= self.max_active <= most:
            raise ValueError(
                f"rollout.max_active = {self.max_active}: a step or the window needs "
                f"{max(per_step, self.window)} groups, and more than {most} break the bound of {limit} steps of "
                f"staleness; give a number between, raise max_staleness, or leave it out for {min(active, most)}"
            )
        if self.max_attempts > 1 and self.group_size == 1:
            raise ValueError(
                f"rollout.max_attempts = {self.max_attempts} with rollout.group_size = 1: the reward of one rollout "
                "equals itself, so every group would be replaced; use a group_size of 2 or more"
            )
        return self

    @property
    def staleness_limit(self) -> int:
        """Oldest that a token may be when it is learnt from, in optimizer steps."""
        return staleness_limit(self.max_staleness, self.prompts_per_step, self.window)


class VllmConfig(Section):
    python: FilePath = ""
    """Interpreter of an environment with vLLM 0.32, numpy and xxhash; `make vllm` builds one for CPUs."""
    arguments: list[str] = Field(default_factory=list)
    """More arguments for `vllm serve`, for example `["--gpu-memory-utilization", "0.4"]`."""


class GeneratorConfig(Section):
    backend: Literal["native", "vllm"] = "native"
    """Engine that generates: this package's, or one vLLM server per replica, which cannot repeat its rollouts."""
    vllm: VllmConfig = VllmConfig()
    """Settings of vLLM, with `backend = "vllm"`."""
    replicas: Annotated[
        int,
        BeforeValidator(lambda value: 0 if value == "auto" else value, json_schema_input_type=int | Literal["auto"]),
    ] = Field(default=1, ge=0, le=1 << 14)
    """Independent generators, each with its own process and weights; 'auto' or 0 with `cluster.kind = "hosts"`: as many
    as the hosts have room for, those that come later included."""
    max_running: int = Field(default=128, ge=1, le=1 << 16)
    """Rollouts that one replica decodes at once; the rest wait in its queue."""
    prefill_tokens: int = Field(default=2048, ge=1)
    """Prompt tokens that join one engine step at most; longer prompts are prefilled in chunks."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads per replica; trainer and generators together should not exceed the cores."""
    dtype: Literal["float32", "bfloat16", "int8", "fp8"] = "float32"
    """Weights; with 8 bits the KV cache and everything else is bfloat16, or float32 where that is faster."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Processes, and devices, that share the weights of one replica."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """Keys and values of running rollouts when weights change: keeping them costs nothing, recomputing them makes what
    follows exactly the new policy's."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Memory for keys and values per process; none: what `max_running` full contexts take, within what is free."""
    kv_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"
    """Keys and values in the cache; `auto`: float32 for float32 weights, else bfloat16. fp8 (e4m3) takes half of the
    memory, so twice the rollouts or tokens fit."""
    device: Device = "cpu"
    """`cpu`, `cuda` (the next free GPUs, one for each rank), or `cuda:0,2-3` to name them."""
    router_replay: bool = True
    """A mixture's rollouts tell which experts computed each token, and the trainer computes it with the same: without
    that, tokens for which the two choose otherwise make most of what they differ in."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """Decode steps are captured on GPUs, collectives of `tensor_parallel` too; they then start without the host."""


class WeightSyncConfig(Section):
    transport: str = "auto"
    """Transport that carries the weights; `auto` measures at the start what is possible here and takes the fastest."""
    delta: bool = False
    """Send only what changed since the last version, where that is less: for slow links and low learning rates."""
    patience_s: float = Field(default=10.0, gt=0)
    """A generator that has not adopted a version after so long, or four times as long as half of the others and 4 s, is
    left behind: the run goes on without it, and it gets no new requests until it has caught up."""
    on_mismatch: Literal["stop", "resync"] = "stop"
    """Weights that arrive otherwise than they were sent end the run, or are sent again (and counted)."""
    probe_every_steps: int = Field(default=4, ge=0)
    """After the first step since the trainer began, and each so many, trainer and generators compute log-probabilities
    of a few sequences, of 1,024 tokens at most; about one step in 16, one of these, tells causes; 0: never."""
    max_mismatch: float = Field(default=0.5, gt=0)
    """Mean absolute difference of these log-probabilities, in nats, from which the run stops: the weights are wrong.
    Rounding gives 0.001 (bfloat16) to 0.1 (8 bits)."""

    @model_validator(mode="before")
    @classmethod
    def _without_power_of_two_scales(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "power_of_two_scales" not in values:
            return values
        if values["power_of_two_scales"]:
            raise ValueError("weight_sync.power_of_two_scales = true is not a setting any more; leave it out")
        return {name: value for name, value in values.items() if name != "power_of_two_scales"}  # of an older run


class RewardConfig(RewardParts):
    parts: list[Ref] = Field(default_factory=lambda: [Ref(name="gsm8k")], min_length=1)
    """Files in `rewards`; with several, the reward is their weighted sum and the first alone decides what is right."""
    model: RewardModelConfig | None = None
    """A model that scores responses, in an executor of its own; what is right stays with the first part."""
    max_invalid_share: float = Field(default=0.5, gt=0, le=1)
    """A step with a larger share of invalid rewards stops the run: the grader is broken, not the policy."""


class ShapingConfig(Section):
    """Changes that training makes to the rewards; evaluations and the metrics of rewards have none of them."""

    length_penalty: float = Field(default=0.0, ge=0)
    """Taken off the reward of a response of `rollout.max_new_tokens`, and in proportion off shorter ones; 0: none."""
    overlong_penalty: float = Field(default=0.0, ge=0)
    """Taken off the reward of a response of `rollout.max_new_tokens`, and in proportion off those that end within
    `overlong_share` of it (soft overlong punishment of DAPO, which uses 1); 0: none."""
    overlong_share: float = Field(default=0.2, gt=0, le=1)
    """Last part of `rollout.max_new_tokens`, where `overlong_penalty` grows; DAPO uses a fifth."""
    mask_truncated: bool = False
    """Leave responses that ended by length out of loss and baselines, as if they had not been judged."""


class CheckpointConfig(Section):
    every_steps: int = Field(default=50, ge=0)
    """Save each so many steps, and always at the end; 0: only at the end."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    mirror: bool = False
    """Trainer and critic copy their state into this host's memory (/dev/shm, two copies) after each step, beside the
    next one: when their processes die, new ones go on from there. With `cluster.min_hosts` below `num_hosts` also into
    another host's."""
    keep_every: int = Field(default=0, ge=0)
    """The checkpoint of every multiple of so many steps is never removed, or the first after it where none is due
    then; 0: only the newest are kept."""
    copy_to: FilePath = ""
    """A mounted folder, or `scheme://bucket/path` that fsspec opens: what is saved is copied to `<copy_to>/<name>`
    beside the run, kept there by the same rules, and brought back by `--resume` where none is here; empty: nowhere."""


class ScreenConfig(Section):
    kind: Literal["auto", "live", "lines", "none"] = "auto"
    """`live` draws, `lines` prints one line per step; `auto` is live on a terminal."""
    completions: int = Field(default=2, ge=0)
    """Completions shown at a time, with reward and advantage."""


class RunConfig(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder name of the run."""
    output: FilePath = "runs"
    """Folder that holds run folders."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seeds data order, sampling noise and initial weights."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    recipe: str = ""
    """Function in `recipes`, for example `grpo`: it settles what this file and the command line leave open."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    generator: GeneratorConfig = GeneratorConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    trainer: TrainerConfig = TrainerConfig()
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig = Field(default_factory=RewardConfig)
    shaping: ShapingConfig = ShapingConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()
    metrics: MetricsConfig = MetricsConfig()
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    launch: LaunchConfig = LaunchConfig()
    screen: ScreenConfig = ScreenConfig()

    @property
    def generators_sleep(self) -> bool:
        """Generators give their memory up while trainer and critic work."""
        return self.cluster.placement == "colocated" and self.generator.backend == "native"

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        rollout = self.rollout
        if self.cluster.placement == "colocated" and rollout.max_staleness > 0:
            raise ValueError(
                f"cluster.placement = 'colocated' runs phases in turn and needs rollout.max_staleness = 0, "
                f"not {rollout.max_staleness}"
            )
        if self.checkpoint.mirror and self.cluster.kind == "inline":
            raise ValueError(
                "checkpoint.mirror = true with cluster.kind = 'inline': all executors die with the one process, and no "
                f"copy in memory helps; {use_processes()}, or leave it out"
            )
        reference = self.reference
        if reference.kl_coefficient and reference.kl_in == "loss" and reference.kl_estimator == "k1":
            raise ValueError(
                "reference.kl_estimator = 'k1' in the loss has no gradient on average; use 'k2' or 'k3', "
                "or reference.kl_in = 'reward'"
            )
        is_truncated = rollout.top_p < 1 or rollout.top_k or rollout.min_p
        if reference.kl_coefficient and is_truncated:
            raise ValueError(
                "reference.kl_coefficient compares with what was sampled, and rollout.top_p, top_k or min_p leave "
                "tokens out that the reference counts; leave them out, or leave reference.kl_coefficient out"
            )
        if reference.dtype == "fp8" and reference.device == "cpu":
            raise ValueError("reference.dtype = 'fp8' needs a GPU; with reference.device = 'cpu' use 'int8'")
        return self

    @model_validator(mode="after")
    def _sources(self) -> RunConfig:
        places = [(f"data.train.{number}", one) for number, one in enumerate(self.data.sources)]
        places += [(f"data.eval.{number}", one) for number, one in enumerate(self.data.eval_sets)]
        for place, source in places:
            of_run = ("environment", "tools", "reward", "max_new_tokens", "template_arguments")
            own = [name for name in of_run if getattr(source, name)]
            if self.rollout.agent and own:
                raise ValueError(
                    f"{place}.{own[0]} with rollout.agent = {self.rollout.agent.name!r}: the agent runs "
                    "every episode by the settings of the run; leave one of them out"
                )
            world = source.environment
            if world and ":" in world.name and not source.reward and "reward" not in self.model_fields_set:
                raise ValueError(
                    f"{place}: {world.name} without a reward, which judges episodes that it does not: set "
                    "`reward` there, or reward.parts"
                )
            if isinstance(source, EvalSet):
                source.settled(self.eval, place)
        return self

    def of(self, source: SourceConfig) -> RunConfig:
        """The run as if this source were its only one: with its data, limits, environment and rewards."""
        rollout, reward = self.rollout, self.reward
        if source.max_new_tokens is not None:
            rollout = rollout.model_copy(update={"max_new_tokens": source.max_new_tokens})
        if source.environment is not None:
            rollout = rollout.model_copy(update={"environment": source.environment, "tools": source.tools})
        if source.reward is not None:
            reward = reward.model_copy(update={"parts": source.reward.parts, "weights": source.reward.weights})
        own = {"data": self.data.of(source), "rollout": rollout, "reward": reward}
        own |= {"eval": source.settled(self.eval, "data.eval")} if isinstance(source, EvalSet) else {}
        return self.model_copy(update=own)

    @property
    def by_eval_set(self) -> dict[str | None, RunConfig]:
        """The run as if each set of held-out problems were its only one, by name; None where `data.eval` is no list."""
        sets: dict[str | None, RunConfig] = {one.label: self.of(one) for one in self.data.eval_sets}
        return sets or ({None: self} if self.data.eval else {})

    @property
    def by_source(self) -> dict[str, RunConfig]:
        """The run as if each source were its only one, by `Prompt.source`: sources that are trained on, and sets of
        held-out problems; under the empty one the run itself, for prompts without a label."""
        return {"": self} | {key: self.of(source) for key, source in self.data.by_key.items()}

    @property
    def has_episodes(self) -> bool:
        """Some rollouts are of several turns."""
        rollouts = (one.rollout for one in self.by_source.values())
        return self.rollout.agent is not None or any(one.environment for one in rollouts)

    @model_validator(mode="after")
    def _judged(self) -> RunConfig:
        own = self.rollout.agent or self.rollout.environment
        if own and ":" in own.name and "reward" not in self.model_fields_set:
            raise ValueError(f"{own.name} without [reward], which judges episodes that it does not: set reward.parts")
        return self

    @model_validator(mode="after")
    def _rates(self) -> RunConfig:
        trainer = self.trainer
        if trainer.decay == "constant" and (trainer.decay_steps or trainer.decay_floor):
            raise ValueError(
                f"trainer.decay_steps = {trainer.decay_steps} and trainer.decay_floor = {trainer.decay_floor:g} do "
                "nothing with trainer.decay = 'constant'; leave them out, or use 'linear' or 'cosine'"
            )
        if trainer.decay != "constant" and trainer.decay_steps <= trainer.warmup_steps:
            raise ValueError(
                f"trainer.decay = {trainer.decay!r} with trainer.decay_steps = {trainer.decay_steps} ends before it "
                f"begins, after trainer.warmup_steps = {trainer.warmup_steps}; set decay_steps, as to `steps`"
            )
        return self

    @model_validator(mode="after")
    def _places(self) -> RunConfig:
        generator, transport = self.generator, self.weight_sync.transport
        if self.weight_sync.delta and (
            transport in ("shared_memory", "cuda_ipc", "nixl") or self.cluster.kind == "inline"
        ):
            raise ValueError(
                "weight_sync.delta = true saves nothing where generators serve or read what lies in the trainer's "
                f"memory; leave it out, or with weight_sync.transport = 'p2p' {use_processes()}"
            )
        if transport == "in_place" and not self.generators_sleep:
            raise ValueError(
                "weight_sync.transport = 'in_place' serves weights that the trainer changes; use 'auto', or "
                "cluster.placement = 'colocated' with generator.backend = 'native'"
            )
        if generator.dtype == "fp8" and generator.device == "cpu":
            raise ValueError("generator.dtype = 'fp8' needs a GPU; with generator.device = 'cpu' use 'int8'")
        if generator.kv_dtype == "fp8" and generator.device == "cpu":
            raise ValueError("generator.kv_dtype = 'fp8' needs a GPU; with generator.device = 'cpu' use 'bfloat16'")
        if self.cluster.kind == "inline":
            for name, settings in (("trainer", self.trainer), ("critic", self.critic)):
                if (num_ranks := settings.parallelism.num_ranks) > 1:
                    raise ValueError(
                        f"{name}.parallelism asks for {num_ranks} processes, and cluster.kind = 'inline' has only one; "
                        f"{use_processes()}"
                    )
            if generator.tensor_parallel > 1:
                raise ValueError(
                    f"generator.tensor_parallel = {generator.tensor_parallel} needs a process for each rank; "
                    + use_processes()
                )
            if transport not in ("auto", "in_place", "shared_memory", "file"):
                raise ValueError(
                    f"weight_sync.transport = {transport!r} goes from process to process, and cluster.kind = 'inline' "
                    f"has only one; use 'auto', or {use_processes()}"
                )
        return self

    @model_validator(mode="after")
    def _replicas(self) -> RunConfig:
        if not self.generator.replicas and self.cluster.kind != "hosts":
            raise ValueError(
                "generator.replicas = 'auto' counts what several hosts have room for; give a number, or use "
                "cluster.kind = 'hosts'"
            )
        return self

    @model_validator(mode="after")
    def _backend(self) -> RunConfig:
        generator, chosen = self.generator, "generator.backend = 'vllm'"
        if generator.backend == "native":
            if generator.vllm != VllmConfig():
                raise ValueError(f"generator.vllm is set and not used; set {chosen}, or leave it out")
            return self
        if not generator.vllm.python:
            raise ValueError(f"{chosen} needs generator.vllm.python, the interpreter of an environment that has vLLM")
        if generator.dtype in ("int8", "fp8"):
            raise ValueError(
                f"generator.dtype = {generator.dtype!r} is not sent to vLLM; with {chosen} use 'bfloat16' or 'float32'"
            )
        if generator.tensor_parallel > 1:
            raise ValueError(
                f"generator.tensor_parallel = {generator.tensor_parallel} cuts the native engine; with {chosen} use "
                f"generator.vllm.arguments = ['--tensor-parallel-size', '{generator.tensor_parallel}']"
            )
        if generator.cuda_graphs == "off":
            raise ValueError(
                f"generator.cuda_graphs = 'off' is the native engine's; with {chosen} use "
                "generator.vllm.arguments = ['--enforce-eager']"
            )
        if self.trainer.lora:
            raise ValueError(
                "trainer.lora sends adapters, which only the native engine merges; leave it out, or use "
                "generator.backend = 'native'"
            )
        if self.cluster.kind == "inline":
            raise ValueError(f"{chosen} runs processes of its own; {use_processes()} instead of 'inline'")
        return self
