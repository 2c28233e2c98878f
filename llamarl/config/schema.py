"""Every setting of a run, with its unit, its default and the reason for it. Frozen after validation."""

from __future__ import annotations

from datetime import time
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from llamarl.config.cluster import ClusterConfig, use_processes
from llamarl.config.data import (
    AGENTS,
    MIN_TEMPERATURE,
    DataConfig,
    EvalConfig,
    EvalSet,
    SourceConfig,
    TrainSource,
    with_agent,
    with_tools,
)
from llamarl.config.ref import Ref
from llamarl.config.roles import (
    AgentConfig,
    CriticConfig,
    ReferenceConfig,
    RewardModelConfig,
    RewardParts,
    TrainerConfig,
)
from llamarl.config.section import Device, FilePath, Section


class KubernetesConfig(Section):
    image: str = ""
    """Container image with llamarl. Required."""
    claim: str = Field(default="", pattern=r"^(|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)$")
    """PersistentVolumeClaim that all pods can write to (ReadWriteMany), with the model, the data and the runs."""
    mount: str = Field(default="/work", pattern=r"^/[^\s:]*$")
    """Path where pods mount `claim`. Relative paths of the run begin there."""
    namespace: str = Field(default="default", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    """Kubernetes namespace of all created objects."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs of each host. Default: the fewest with which every executor has a place."""
    cpu: int | str = ""
    """CPUs of each host, for example `16`. Empty means the cluster's default."""
    memory: int | str = ""
    """Memory of each host, for example `128Gi`. Empty means the cluster's default."""


class LaunchConfig(Section):
    slurm: dict[str, bool | int | str | time | list[str] | dict[str, bool | int | str | time]] = Field(
        default_factory=dict
    )
    """Options of `sbatch` by long name, for example `partition`, `account`, `time`, `gpus_per_node`. Also `setup`
    (lines before the first command), `template` (path of your own script) and `generators` (a table: `nodes` and
    options of a second component for the generators)."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Settings of `llamarl launch kubernetes`."""


class MetricsConfig(Section):
    sinks: list[str] = Field(default_factory=lambda: ["jsonl"])
    """Sinks of metrics: always `metrics.jsonl`, and any of `tensorboard`, `wandb`, `mlflow`, `prometheus`."""
    port: int = Field(default=9464, ge=1, lt=1 << 16)
    """Local port of `prometheus`. Each run on a machine needs a different port."""


class RecordConfig(Section):
    max_bytes: int = Field(default=1 << 28, ge=1 << 16)
    """Size at which `metrics.jsonl` and `events.jsonl` continue in a new piece, `metrics-00001.jsonl.gz`. All are
    kept."""
    kind: Literal["resume", "all"] = "all"
    """`all` keeps all rollouts and trained steps, for display, export, and `llamarl replay` from any checkpoint (16
    bytes per token, compressed). `resume` keeps only rollouts that a kept checkpoint needs to resume."""


class ModelConfig(Section):
    path: FilePath
    """Hugging Face folder (`config.json`, `model.safetensors`, `tokenizer.json`), a name on the Hub (`owner/name`,
    `owner/name@revision`), or a run folder, which means its newest checkpoint."""
    warm_start: FilePath = ""
    """SFT TOML that makes `path` if it is missing (relative to this file). Empty means that `path` must exist."""
    adapter: FilePath = ""
    """Folder of a LoRA adapter in PEFT format, merged into `path` before the run starts. Empty means none."""


def staleness_limit(max_staleness: int, prompts_per_step: int, window: int) -> int:
    """Returns L = S + ceil((W - 1) / P), the most optimizer steps between sampling a token and training on it.

    `docs/staleness.md` has the proof. L = 0 for S = 0, because a step then takes all active groups.
    """
    return max_staleness + -(-(window - 1) // prompts_per_step) if max_staleness else 0


class RolloutConfig(Section):
    prompts_per_step: int = Field(default=16, ge=1, le=1 << 20)
    """P: groups per optimizer step."""
    group_size: int = Field(default=8, ge=1, le=1 << 16)
    """G: rollouts per prompt."""
    max_staleness: int = Field(default=1, ge=0)
    """S, in optimizer steps: at most (S + 1) * P groups are active. 0 is exactly synchronous."""
    window: int = Field(default=1, ge=1)
    """W, in groups: up to W - 1 younger groups may overtake a slow one. Staleness is at most S + ceil((W - 1) / P)."""
    max_active: int = Field(default=0, ge=0)
    """Groups in flight. 0 means (S + 1) * P. More, up to (L + 1) * P - (W - 1) with L the bound of staleness, keep
    generators busier. Tokens get older on average, and never older than the bound."""
    max_attempts: int = Field(default=1, ge=1)
    """Most groups generated per group that is trained on. A group with equal rewards teaches nothing and is replaced by
    another prompt (dynamic sampling, DAPO). After that many, a step takes what it has. 1 means no replacement."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response, in tokens, over all its segments."""
    segment_tokens: int = Field(default=0, ge=0)
    """A response is parked after this many new tokens, and continues on the least busy generator. 0 means never. Short
    segments balance generators and lose less when one dies. Each costs a prefill of the tokens before it."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """A response also ends when its text contains one of these strings."""
    environment: Ref | None = None
    """Environment that replies between turns of the policy: a file in `environments/`, or `package.module:Class`. None
    means that a response is one turn. Observed tokens count towards `max_new_tokens` and are not trained on."""
    tools: list[str] = Field(default_factory=list)
    """Python functions that the policy may call, each `package.module:function`. They form an environment, and the chat
    template describes them to the policy."""
    agent: Annotated[
        AgentConfig | None,
        BeforeValidator(
            lambda value: {"name": value} if isinstance(value, str) else value,
            json_schema_input_type=AgentConfig | str | None,
        ),
    ] = None
    """Program that has the policy work over OpenAI's protocol and returns the reward: `package.module:run`.
    `max_new_tokens` bounds the sampled tokens of an episode, and each of its sequences after the first prompt."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=100)
    """Temperature of sampling. The trainer uses the same."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. 1 means off, which keeps importance ratios exact."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens. 0 means off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens below this share of the most likely one. 0 means off."""

    @model_validator(mode="before")
    @classmethod
    def _tools_are_an_environment(cls, values: Any) -> Any:
        return with_tools(with_agent(values), "rollout.")

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
        """Most optimizer steps between sampling a token and training on it."""
        return staleness_limit(self.max_staleness, self.prompts_per_step, self.window)


class VllmConfig(Section):
    python: FilePath = ""
    """Python interpreter of an environment with vLLM 0.32, numpy and xxhash. `make vllm` builds one for CPUs."""
    arguments: list[str] = Field(default_factory=list)
    """More arguments for `vllm serve`, for example `["--gpu-memory-utilization", "0.4"]`."""


class GeneratorConfig(Section):
    backend: Literal["native", "vllm"] = "native"
    """Engine: this package's, or one vLLM server per replica, whose rollouts cannot be replayed."""
    vllm: VllmConfig = VllmConfig()
    """Settings of vLLM, with `backend = "vllm"`."""
    replicas: Annotated[
        int,
        BeforeValidator(lambda value: 0 if value == "auto" else value, json_schema_input_type=int | Literal["auto"]),
    ] = Field(default=1, ge=0, le=1 << 14)
    """Independent generators, each with its own process and weights. 'auto' or 0 with `cluster.kind = "hosts"` means as
    many as fit on the hosts, including hosts that connect later."""
    max_running: int = Field(default=128, ge=1, le=1 << 16)
    """Rollouts that each replica decodes at once. Further rollouts wait in its queue."""
    prefill_tokens: int = Field(default=2048, ge=1)
    """Most prompt tokens per engine step. Longer prompts are prefilled in chunks."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads per replica. Trainer and generators together should not exceed the cores."""
    dtype: Literal["float32", "bfloat16", "int8", "fp8"] = "float32"
    """Type of the weights. With 8 bits, everything else is bfloat16, or float32 where that is faster."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Processes, with a device each, that share the weights of one replica."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """Keys and values of running rollouts when weights change. Keeping them costs nothing. Recomputing them makes later
    tokens follow the new policy exactly."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Memory for keys and values per process. None means `max_running` full contexts, as far as memory is free."""
    kv_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"
    """Type of keys and values in the cache. `auto` means float32 for float32 weights, else bfloat16. fp8 (e4m3) takes
    half the memory, so twice the rollouts or tokens fit."""
    device: Device = "cpu"
    """`cpu`, `cuda` (the next free GPUs, one for each rank), or `cuda:0,2-3` to name them."""
    router_replay: bool = True
    """Rollouts of a mixture record the experts of each token, and the trainer uses the same experts. Different choices
    would otherwise cause most of the difference between trainer and generators."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """Captures decode steps on GPUs, with the collectives of `tensor_parallel`. Steps then start without the host."""


class WeightSyncConfig(Section):
    transport: str = "auto"
    """Transport of weights. `auto` measures the possible ones at the start and uses the fastest."""
    delta: bool = False
    """Sends only the weights that changed, if that is less. For slow links and low learning rates."""
    patience_s: float = Field(default=10.0, gt=0)
    """A generator that has not adopted a version after this time is left behind. The run continues without it, and it
    gets no new requests until it has caught up."""
    on_mismatch: Literal["stop", "resync"] = "stop"
    """If weights do not arrive as they were sent, ends the run, or sends them again and counts it."""
    probe_every_steps: int = Field(default=4, ge=0)
    """Every N steps, and after the trainer's first, trainer and generators compare log-probabilities of a few sequences
    of at most 1,024 tokens. About one step in 16 also analyzes causes of differences. 0 means never."""
    max_mismatch: float = Field(default=0.5, gt=0)
    """Mean absolute difference of these log-probabilities, in nats, at which the run stops because weights are wrong.
    Rounding causes 0.001 (bfloat16) to 0.1 (8 bits)."""


class RewardConfig(RewardParts):
    parts: list[Ref] = Field(default_factory=lambda: [Ref(name="gsm8k")], min_length=1)
    """Files in `rewards`. With several, the reward is their weighted sum, and only the first part decides
    correctness."""
    model: RewardModelConfig | None = None
    """Model that scores responses, in its own executor. The first part still decides correctness."""
    max_invalid_share: float = Field(default=0.5, gt=0, le=1)
    """A step with a larger share of invalid rewards stops the run: the grader is broken, not the policy."""


class ShapingConfig(Section):
    """Changes of rewards in training. Evaluations and reward metrics do not include them."""

    length_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from the reward of a response of `rollout.max_new_tokens`, and in proportion from shorter ones. 0
    means none."""
    overlong_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from the reward of a response of `rollout.max_new_tokens`, and in proportion from responses that end
    within the last fifth of it (soft overlong punishment of DAPO, which uses 1). 0 means none."""
    credit: Literal["episode", "turn", "discounted"] = "episode"
    """Rewards that the tokens of a turn learn from. `episode`: all of the episode. `turn`: the turn's own.
    `discounted`: the turn's own and later ones, each later turn times `turn_discount`. The n-th turns of a group are
    compared with each other."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """Factor per turn of `credit = "discounted"`. 1 sums the rewards to go."""
    mask_truncated: bool = False
    """Excludes responses that reached the length limit from loss and baselines, as if they had no reward."""

    @model_validator(mode="after")
    def _discounts(self) -> ShapingConfig:
        if self.turn_discount != 1 and self.credit != "discounted":
            raise ValueError(
                f"turn_discount = {self.turn_discount:g} does nothing with credit = {self.credit!r}; set credit = "
                "'discounted', or leave it out"
            )
        return self


class CheckpointConfig(Section):
    every_steps: int = Field(default=50, ge=0)
    """Save every N steps, and always at the end. 0 means only at the end."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    mirror: bool = False
    """Trainer and critic copy their state into this host's memory (/dev/shm, two copies) after each step, in parallel
    with the next one. If their processes die, new ones resume from it. With `cluster.min_hosts` below `num_hosts`,
    another host gets a copy, too."""
    keep_every: int = Field(default=0, ge=0)
    """Keeps the checkpoint of every multiple of N steps forever, or the first one after it. 0 means that only the
    newest are kept."""
    copy_to: FilePath = ""
    """Mounted folder, or `scheme://bucket/path` for fsspec. Checkpoints are also copied to `<copy_to>/<name>`, kept
    there by the same rules, and restored by `--resume` if they are missing here. Empty means no copy."""


class ScreenConfig(Section):
    kind: Literal["auto", "live", "lines", "none"] = "auto"
    """`live` draws, `lines` prints one line per step, and `auto` is live on a terminal."""
    completions: int = Field(default=2, ge=0)
    """Completions to show at a time, with reward and advantage."""


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
    """Function in `recipes`, for example `grpo`. It sets what this file and the command line leave open."""
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
        """Returns whether generators release their memory while trainer and critic work."""
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
                "checkpoint.mirror = true with cluster.kind = 'inline': all executors share one process, so a copy in "
                f"memory dies with them; {use_processes()}, or leave it out"
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
                "reference.kl_coefficient compares with the sampled distribution, and rollout.top_p, top_k or min_p "
                "leave tokens out that the reference counts; leave them out, or leave reference.kl_coefficient out"
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
            if world and world.name in AGENTS:
                raise ValueError(
                    f"{place}.environment = {world.name!r} is an agent, which runs the episodes of all sources: set "
                    f"rollout.agent = {world.name!r} instead"
                )
            if world and ":" in world.name and not source.reward and "reward" not in self.model_fields_set:
                raise ValueError(
                    f"{place}: {world.name} without a reward, which scores episodes that the environment does not: set "
                    "`reward` there, or reward.parts"
                )
            if isinstance(source, EvalSet):
                source.resolved(self.eval, place)
        return self

    def of(self, source: SourceConfig) -> RunConfig:
        """Returns the settings with this source as the only one: with its data, limits, environment and rewards."""
        rollout, reward = self.rollout, self.reward
        if source.max_new_tokens is not None:
            rollout = rollout.model_copy(update={"max_new_tokens": source.max_new_tokens})
        if source.environment is not None:
            rollout = rollout.model_copy(update={"environment": source.environment, "tools": source.tools})
        if source.reward is not None:
            reward = reward.model_copy(update={"parts": source.reward.parts, "weights": source.reward.weights})
        own: dict[str, Section] = {"data": self.data.of(source), "rollout": rollout, "reward": reward}
        if isinstance(source, TrainSource) and source.teacher:
            own["reference"] = self.reference.model_copy(update={"path": source.teacher})
        own |= {"eval": source.resolved(self.eval, "data.eval")} if isinstance(source, EvalSet) else {}
        return self.model_copy(update=own)

    @property
    def by_eval_set(self) -> dict[str | None, RunConfig]:
        """Settings for each set of held-out problems as the only one, by name. The name is None if `data.eval` is not a
        list."""
        sets: dict[str | None, RunConfig] = {one.label: self.of(one) for one in self.data.eval_sets}
        return sets or ({None: self} if self.data.eval else {})

    @property
    def by_source(self) -> dict[str, RunConfig]:
        """Settings for each source as the only one, by `Prompt.source`: training sources and sets of held-out problems.
        The empty name has the run's settings, for prompts without a label."""
        return {"": self} | {key: self.of(source) for key, source in self.data.by_key.items()}

    @property
    def references(self) -> dict[str, str]:
        """Folders of the reference models by `Prompt.source`. The empty name has that of all other prompts, if there
        are others."""
        found = {one.label: one.teacher for one in self.data.sources if one.teacher}
        is_complete = bool(found) and len(found) == len(self.data.sources)
        return found if is_complete else found | {"": self.reference.path or self.model.path}

    @property
    def has_episodes(self) -> bool:
        """Returns whether some rollouts have several turns."""
        rollouts = (one.rollout for one in self.by_source.values())
        return self.rollout.agent is not None or any(one.environment for one in rollouts)

    @model_validator(mode="after")
    def _judged(self) -> RunConfig:
        own = self.rollout.agent or self.rollout.environment
        if own and ":" in own.name and "reward" not in self.model_fields_set:
            raise ValueError(
                f"{own.name} without [reward], which scores episodes that the environment does not: set reward.parts"
            )
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
                f"begins, after trainer.warmup_steps = {trainer.warmup_steps}; set decay_steps, for example to `steps`"
            )
        return self

    @model_validator(mode="after")
    def _places(self) -> RunConfig:
        generator, transport = self.generator, self.weight_sync.transport
        if self.weight_sync.delta and (
            transport in ("shared_memory", "cuda_ipc", "nixl") or self.cluster.kind == "inline"
        ):
            raise ValueError(
                "weight_sync.delta = true saves nothing if generators serve or read weights in the trainer's "
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
                    f"weight_sync.transport = {transport!r} connects processes, and cluster.kind = 'inline' "
                    f"has only one; use 'auto', or {use_processes()}"
                )
        return self

    @model_validator(mode="after")
    def _replicas(self) -> RunConfig:
        if not self.generator.replicas and self.cluster.kind != "hosts":
            raise ValueError(
                "generator.replicas = 'auto' counts what fits on several hosts; give a number, or use "
                "cluster.kind = 'hosts'"
            )
        return self

    @model_validator(mode="after")
    def _backend(self) -> RunConfig:
        generator, chosen = self.generator, "generator.backend = 'vllm'"
        if generator.backend == "native":
            if generator.vllm != VllmConfig():
                raise ValueError(f"generator.vllm is set but not used; set {chosen}, or leave it out")
            return self
        if not generator.vllm.python:
            raise ValueError(f"{chosen} needs generator.vllm.python, the interpreter of an environment that has vLLM")
        if generator.dtype in ("int8", "fp8"):
            raise ValueError(
                f"generator.dtype = {generator.dtype!r} fails with vLLM; with {chosen} use 'bfloat16' or 'float32'"
            )
        if generator.tensor_parallel > 1:
            raise ValueError(
                f"generator.tensor_parallel = {generator.tensor_parallel} shards the native engine; with {chosen} use "
                f"generator.vllm.arguments = ['--tensor-parallel-size', '{generator.tensor_parallel}']"
            )
        if generator.cuda_graphs == "off":
            raise ValueError(
                f"generator.cuda_graphs = 'off' is for the native engine; with {chosen} use "
                "generator.vllm.arguments = ['--enforce-eager']"
            )
        if self.trainer.lora:
            raise ValueError(
                "trainer.lora sends adapters, which only the native engine merges; leave it out, or use "
                "generator.backend = 'native'"
            )
        if self.cluster.kind == "inline":
            raise ValueError(f"{chosen} starts its own processes; {use_processes()} instead of 'inline'")
        return self
