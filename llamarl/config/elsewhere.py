"""Names of settings that llamarl does not have: those of TRL, verl, prime-rl, OpenRLHF and vLLM, by the last part of
their names, and those of earlier versions of llamarl.

`docs/coming_from.md` shows the common ones side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_CLIP = (
    "the bounds of clipping are options of the loss: `trainer.loss.clip` of `grpo`, `ppo_clip` and `decoupled_ppo`, "
    "`trainer.loss.clip_low` and `trainer.loss.clip_high` of `dapo`, `gspo` and `cispo`"
)
_EPOCHS = "a run counts optimizer steps, not epochs: set `steps`, and `rollout.prompts_per_step`"
_ACCUMULATES = "each step accumulates gradients over all of its rollouts; set `trainer.microbatch_tokens` for memory"
_ONE_UPDATE = "each step makes one update of all its groups: set `rollout.prompts_per_step`, or `trainer.passes`"
_LOGS = "every step is logged: `metrics.sinks` says where to, and `screen.kind` what the terminal shows"
_BATCH = ("rollout.prompts_per_step",)
_GROUP = ("rollout.group_size",)
_RESPONSE = ("rollout.max_new_tokens",)
_CONTEXT = ("data.max_prompt_tokens", "rollout.max_new_tokens")
_MICROBATCH = ("trainer.microbatch_tokens",)
_RATE = ("trainer.learning_rate",)
_STALENESS = ("rollout.max_staleness",)
_KL = ("reference.kl_coefficient",)
_SAVE = ("checkpoint.every_steps",)
_EVAL = ("eval.every_steps",)
_TRAIN, _HELD_OUT = ("data.train",), ("data.eval",)
_REWARD = ("reward.parts",)
_TP = ("generator.tensor_parallel",)

ELSEWHERE: dict[str, tuple[str, ...] | str] = {
    # how much is generated
    **dict.fromkeys(("batch_size", "train_batch_size", "generation_batch_size", "rollout_batch_size"), _BATCH),
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "rollouts_per_example"), _GROUP),
    "n": ("rollout.group_size", "eval.samples"),
    "num_samples": ("rollout.group_size", "eval.samples"),
    **dict.fromkeys(("max_completion_length", "max_response_length", "max_completion_tokens", "max_tokens"), _RESPONSE),
    **dict.fromkeys(("max_length", "max_seq_length", "seq_len", "max_model_len"), _CONTEXT),
    "max_prompt_length": ("data.max_prompt_tokens",),
    **dict.fromkeys(("max_off_policy_steps", "max_async_level", "async_level", "staleness_threshold"), _STALENESS),
    **dict.fromkeys(("stop", "stop_words"), ("rollout.stop_strings",)),
    "tool_config_path": ("rollout.tools",),
    # length of a run, checkpoints, evaluation
    **dict.fromkeys(("max_steps", "total_training_steps", "num_steps", "train_steps", "iterations"), ("steps",)),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs", "max_epochs"), _EPOCHS),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), _SAVE),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_interval"), _EVAL),
    "interval": (*_SAVE, *_EVAL),
    "save_total_limit": ("checkpoint.keep",),
    **dict.fromkeys(("resume_from_checkpoint", "resume_mode"), "give --resume, which continues the run"),
    **dict.fromkeys(("output_dir", "default_local_dir", "save_path"), ("output",)),
    **dict.fromkeys(("run_name", "experiment_name", "project_name"), ("name",)),
    **dict.fromkeys(("logging_steps", "log_interval"), _LOGS),
    **dict.fromkeys(("report_to", "logger", "use_wandb"), ("metrics.sinks",)),
    # model and data
    **dict.fromkeys(("model_name", "model_name_or_path", "pretrain"), ("model.path",)),
    **dict.fromkeys(("dataset", "dataset_name", "train_dataset", "train_files", "train_file", "prompt_data"), _TRAIN),
    **dict.fromkeys(("eval_dataset", "val_files", "val_file", "eval_file"), _HELD_OUT),
    "system_prompt": ("data.system",),
    **dict.fromkeys(("prompt_template", "chat_template"), ("data.template",)),
    **dict.fromkeys(("chat_template_kwargs", "apply_chat_template_kwargs"), ("data.template_arguments",)),
    # optimizer
    **dict.fromkeys(("lr", "actor_learning_rate"), _RATE),
    "wd": ("trainer.weight_decay",),
    "adam_beta1": ("trainer.beta1",),
    "adam_beta2": ("trainer.beta2",),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_norm", "gradient_clipping"), ("trainer.max_grad_norm",)),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_steps", "num_warmup_steps"), ("trainer.warmup_steps",)),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "warmup_style"), ("trainer.decay",)),
    "gradient_accumulation_steps": _ACCUMULATES,
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size", "micro_train_batch_size"), _MICROBATCH),
    **dict.fromkeys(("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"), _MICROBATCH),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), ("trainer.passes",)),
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size", "steps_per_generation"), _ONE_UPDATE),
    **dict.fromkeys(("gradient_checkpointing", "enable_gradient_checkpointing"), ("trainer.activation_checkpointing",)),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "mixed_precision"), ("trainer.dtype", "generator.dtype")),
    # algorithm
    **dict.fromkeys(("loss_type", "loss_mode", "policy_loss", "loss_fn"), ("trainer.loss",)),
    **dict.fromkeys(("adv_estimator", "scale_rewards", "advantage_estimator"), ("trainer.advantage",)),
    **dict.fromkeys(("epsilon", "epsilon_high", "clip_range", "cliprange", "eps_clip", "clip_ratio"), _CLIP),
    **dict.fromkeys(("clip_ratio_low", "clip_ratio_high", "clip_eps"), _CLIP),
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl_beta"), _KL),
    **dict.fromkeys(("kl_penalty", "kl_loss_type"), ("reference.kl_estimator",)),
    "mask_truncated_completions": ("shaping.mask_truncated",),
    **dict.fromkeys(("overlong_buffer", "overlong_penalty_factor"), ("shaping.overlong_penalty",)),
    **dict.fromkeys(("reward_funcs", "reward_fn", "reward_function", "custom_reward_function", "rubric"), _REWARD),
    "reward_weights": ("reward.weights",),
    **dict.fromkeys(("entropy_coeff", "entropy_coef", "ent_coef"), "no loss here has an entropy bonus; leave it out"),
    "dpo": "llamarl has no DPO, which learns from pairs of answers without sampling any",
    # devices
    **dict.fromkeys(("peft_config", "lora_config", "use_peft"), ("trainer.lora",)),
    **dict.fromkeys(("lora_rank", "lora_r"), ("trainer.lora.rank",)),
    "lora_alpha": ("trainer.lora.alpha",),
    **dict.fromkeys(("target_modules", "lora_target_modules"), ("trainer.lora.targets",)),
    **dict.fromkeys(("tensor_model_parallel_size", "tensor_parallel_size", "vllm_tensor_parallel_size"), _TP),
    **dict.fromkeys(("gpu_memory_utilization", "vllm_gpu_memory_utilization"), ("generator.kv_cache_bytes",)),
    **dict.fromkeys(("num_infer_gpus", "vllm_num_engines", "num_engines"), ("generator.replicas",)),
    **dict.fromkeys(("n_gpus_per_node", "num_train_gpus", "num_gpus"), ("trainer.parallelism.fsdp",)),
    **dict.fromkeys(("nnodes", "num_nodes"), ("cluster.num_hosts", "trainer.parallelism.fsdp")),
    **dict.fromkeys(("use_vllm", "rollout_backend"), ("generator.backend",)),
    **dict.fromkeys(("vllm_mode", "colocate"), ("cluster.placement",)),
    "enforce_eager": ("generator.cuda_graphs",),
}
"""Settings that are meant, or a sentence where no setting is."""
PARTS = {
    "ppo": "ppo_clip", "grpo": "group_normalized", "dr_grpo": "group_mean", "rloo": "leave_one_out",
    "reinforce++": "reinforce_plus_plus",
}  # fmt: skip
"""Losses and advantages by the names that they have elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """A setting of earlier versions. A run file and the command line may not have it. Records of older runs may."""

    fix: str
    """What the user does instead: the end of the message."""
    default: Any = None
    """Recorded value that today's code still follows. A run that was recorded with another value cannot resume."""
    has_no_results: bool = False
    """The value changed no recorded result, so a run resumes whatever it was."""
    successor: str = ""
    """Setting that replaces it. Empty if none does."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of the successor by recorded value. Other values stay as they are."""


DROPPED = {
    "weight_sync.power_of_two_scales": Dropped(fix="leave it out", default=False),
    "record.journal": Dropped(
        fix="set `record.kind` to 'resume' in place of 'needed', or leave it out for 'all'",
        successor="record.kind", values={"needed": "resume"},
    ),
    "cluster.on_generator_failure": Dropped(
        fix="set `cluster.on_failure.generator`, which has the same values", successor="cluster.on_failure.generator"
    ),
    "cluster.restart_window_s": Dropped(
        fix="leave it out: `cluster.max_restarts` counts the deaths of the last 10 minutes", has_no_results=True
    ),
    "cluster.call_timeout_s": Dropped(
        fix="set `cluster.timeout_s`, which is also for starts and hosts", successor="cluster.timeout_s"
    ),
    **dict.fromkeys(
        ("cluster.start_timeout_s", "cluster.stall_timeout_s", "cluster.host_timeout_s"),
        Dropped(fix="set `cluster.timeout_s`, the one timeout of starts, calls and hosts", has_no_results=True),
    ),
    "trainer.max_skipped_steps": Dropped(
        fix="leave it out: three skipped steps in a row end the run", has_no_results=True
    ),
    "trainer.peak_tflops": Dropped(fix="leave it out: the peak for `mfu` is measured", has_no_results=True),
    "reward.model.batch_tokens": Dropped(
        fix="leave it out: a forward pass of the reward model has at most 8192 tokens", has_no_results=True
    ),
    "shaping.overlong_share": Dropped(
        fix="leave it out: `shaping.overlong_penalty` grows over the last fifth of `rollout.max_new_tokens`",
        default=0.2,
    ),
    **dict.fromkeys(
        ("data.filter.unmeasured", "data.train.*.filter.unmeasured"),
        Dropped(fix="leave it out, and measure all prompts with `llamarl eval --rates`", default="refuse"),
    ),
}  # fmt: skip
"""Dropped settings by dotted name, with `*` for the number of an entry in a list. A recorded run is shown and exported
whatever their values are."""
