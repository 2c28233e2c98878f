"""Exports the model of a run as a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamarl.config import ConfigError, RunConfig, read_json
from llamarl.config.data import DataConfig
from llamarl.config.hub import folder_of, hub_name
from llamarl.data.chat_format import (
    chat_template_of,
    of_run,
    resolved_format,
    sample_chat,
    sample_prompt,
)
from llamarl.data.prompts import CHAT, open_tokenizer
from llamarl.data.tokenizer import CONFIG_FILE, TEMPLATE_FILE, Tokenizer
from llamarl.run.hub_pins import base_model, resolved_path

Dtype = Literal["float32", "bfloat16"]
BASE_TEMPLATE = "chat_template.base.jinja"
"""File with the base model's chat template if the run wrote prompts differently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """An exported model."""

    step: int
    folder: Path
    dtype: Dtype
    why: str
    """Sentence on the type of the weights."""
    prompts: str
    """Sentence on how to prompt the exported model."""


def export(
    run: Path, config: RunConfig, folder: str | Path | None, step: int | None, merge: bool, *, command: str,
    dtype: Dtype | None = None,
) -> Exported:  # fmt: skip
    """Writes a checkpoint of a run with the run's prompt format.

    Args:
        config: of the run.
        folder: to write. None means `export` in the run's folder, or `merged` with `merge`.
        step: of the checkpoint. None means the newest valid one.
        merge: merge adapters into the base model instead of writing only adapters.
        command: prefix of lines about commits on the Hub.
        dtype: type of the matrices. None means the type that the run trained and sampled with.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, there is nothing to merge, or `folder` has other
            contents.
    """
    import torch

    from llamarl.checkpoint.store import export_checkpoint

    lora = config.trainer.lora
    if merge and not lora:
        raise ConfigError("--merge is for adapters, and this run trained all weights; leave it out")
    base = base_of(run, config, weights=merge, command=command)
    to = Path(folder) if folder else run / ("merged" if merge else "export")
    chosen, why = _dtype(config, dtype, adapters=lora is not None and not merge)
    templates, prompts = _prompt_files(config, base)

    def texts(at: int) -> dict[str, str]:
        return templates | {"README.md": _card(run, config, base, at, chosen, prompts, merge=merge)}

    written = export_checkpoint(
        run / "checkpoints", base, to, step, lora, merge, dtype=getattr(torch, chosen), texts=texts
    )
    return Exported(step=written, folder=to, dtype=chosen, why=why, prompts=prompts)


def base_of(run: Path, config: RunConfig, *, weights: bool, command: str) -> str:
    """Returns the base model of a run: a folder, or a name on the Hub with its commit, fetched. Raises ConfigError."""
    return resolved_path(
        base_model(run, config.model.path, config.output), "model.path", weights=weights, command=command
    )


def export_values(run: Path, config: RunConfig, to: Path, *, command: str) -> int:
    """Writes the newest checkpoint of a run in float32 with adapters merged, which generators round to their type.
    Returns its step. Raises ConfigError."""
    from llamarl.checkpoint.store import export_checkpoint

    merge = config.trainer.lora is not None
    base = base_of(run, config, weights=merge, command=command)
    return export_checkpoint(run / "checkpoints", base, to, None, config.trainer.lora, merge)


def format_of(config: RunConfig, path: str) -> tuple[DataConfig, Tokenizer]:
    """Returns the prompt format of a run, resolved for the model in `path`, and that model's tokenizer. Raises
    ConfigError."""
    data = config.data.model_copy(update=of_run(config.data, for_agent=config.rollout.agent is not None))
    return resolved_format(data, Tokenizer(path)), open_tokenizer(path, data)


def _dtype(config: RunConfig, given: Dtype | None, *, adapters: bool) -> tuple[Dtype, str]:
    """Returns the type of the exported weights, and a sentence with the reason."""
    if given is not None:
        return (
            given,
            f"weights: {given}, as --dtype says; the run trained with trainer.dtype = {config.trainer.dtype!r}",
        )
    if adapters:
        return "float32", "adapters: float32, which generators of the run add to the base model before rounding"
    trained = config.trainer.dtype
    if trained == "float32":
        return trained, "weights: float32, as trainer.dtype says"
    masters = (
        "" if config.trainer.weights == "bfloat16" else "; --dtype float32 writes the master weights, another policy"
    )
    return trained, f"weights: bfloat16, as trainer.dtype says: what the run trained and sampled with{masters}"


def _prompt_files(config: RunConfig, base: str) -> tuple[dict[str, str], str]:
    """Returns the files with the prompt format of a run, by name, and a sentence that shows the format."""
    data, tokenizer = format_of(config, base)
    try:
        template = chat_template_of(data, tokenizer)
    except ConfigError as error:
        kept = "the base model's chat template stays" if tokenizer.has_chat_template else "there is none"
        return {}, f"prompts: {error}; no chat template is written, {kept}"
    if template is None:
        return {}, f"prompts: the base model's chat template; {sample_prompt(data, tokenizer)}"
    files = {TEMPLATE_FILE: template}
    settings = folder_of(base) / CONFIG_FILE
    if settings.is_file() and "chat_template" in (found := read_json(settings, "copy the file again")):
        files[CONFIG_FILE] = json.dumps(found | {"chat_template": template}, indent=2, ensure_ascii=False) + "\n"
    if data.template != CHAT and tokenizer.template_text:
        files[BASE_TEMPLATE] = tokenizer.template_text
    what = "data.template" if data.template != CHAT else "the base model's chat template with the run's data settings"
    return files, f"prompts: {TEMPLATE_FILE} holds {what}; {sample_chat(tokenizer.with_template(template))}"


def _card(run: Path, config: RunConfig, base: str, step: int, dtype: Dtype, prompts: str, *, merge: bool) -> str:
    """Returns the model card of an exported model: its training, base model and prompts. It contains no path of this
    machine."""
    from llamarl.models.hf import CARD_MARK

    name, adapters = hub_name(base), config.trainer.lora is not None and not merge
    head = {"library_name": "peft" if adapters else "transformers", "pipeline_tag": "text-generation"}
    head |= {"base_model": name.repo} if name else {}
    kind = "LoRA adapters" if adapters else "A model"
    parts = ", ".join(part.name for part in config.reward.parts)
    method = f"reinforcement learning, rewards: {parts}" if (run / "journal").exists() else "supervised fine-tuning"
    return "\n".join([
        "---", *(f"{key}: {value}" for key, value in head.items()), "tags:", "- llamarl", "---", "",
        f"# {config.name}", "",
        f"{kind} trained by {method}, with llamarl: step {step}, written in {dtype}.", "",
        f"Base model: {f'{name.repo} at commit {name.revision}' if name else 'a local folder'}.", "",
        "Prompt format:", "", "```text", prompts.removeprefix("prompts: "), "```", "", CARD_MARK, "",
    ])  # fmt: skip
