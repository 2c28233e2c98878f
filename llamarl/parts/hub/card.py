"""Model cards for models that a run has trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llamarl
from llamarl.config import Ref, RunConfig
from llamarl.config.hub import HubName
from llamarl.observability.files import read_run_rows
from llamarl.run.hub_pins import commits_of, named

MARK = "<!-- Written by llamarl. While this line stays, the next push writes the card anew. -->"


def model_card(run: Path, config: RunConfig, step: int, title: str, *, adapters: bool) -> str:
    """Returns Markdown with a YAML header: base model, data, important settings and evaluations, as recorded. Contains
    no path of this machine.

    Args:
        run: folder of the run.
        step: step of the checkpoint.
        title: name of the repository.
        adapters: the repository contains only LoRA adapters, in PEFT's format.
    """
    names = _names(run, config)
    data = [name for option, (name, _) in names.items() if option.startswith("data.")]
    head = {"library_name": "peft" if adapters else "transformers", "pipeline_tag": "text-generation"}
    head |= {"base_model": names["model.path"][0].repo} if "model.path" in names else {}
    is_rl = (run / "journal").exists()
    method = "reinforcement learning" if is_rl else "supervised fine-tuning"
    lists = {"tags": ["llamarl", method.replace(" ", "-")]}
    if data:
        lists["datasets"] = sorted({name.repo for name in data})
    lines = ["---", *(f"{key}: {value}" for key, value in head.items())]
    lines += [line for key, values in lists.items() for line in (f"{key}:", *(f"- {value}" for value in values))]
    what = "LoRA adapters, trained" if adapters else "Trained"
    lines += ["---", "", f"# {title}", "", f"{what} by {method} with llamarl {llamarl.__version__}.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in _facts(run, config, step))]
    return "\n".join([*lines, "", MARK, ""])


def _facts(run: Path, config: RunConfig, step: int) -> Iterator[tuple[str, str]]:
    names, trainer, rollout = _names(run, config), config.trainer, config.rollout
    texts = {option: f"{name} at commit {commit}" for option, (name, commit) in names.items()}
    yield "base model", texts.get("model.path", "a folder")
    sources = {f"data.train.{n}.source": one.source.name for n, one in enumerate(config.data.sources)}
    if isinstance(config.data.train, Ref):
        sources = {"data.train": config.data.train.name}
    yield "data", ", ".join(texts.get(option, name) for option, name in sources.items())
    yield "steps", f"{step}, of {rollout.prompts_per_step} prompts with {rollout.group_size} responses each"
    yield "loss, advantage", f"{trainer.loss.name}, {trainer.advantage.name}"
    yield "learning rate", f"{trainer.learning_rate:g}"
    yield "reward", ", ".join(part.name for part in config.reward.parts)
    if trainer.lora:
        yield "LoRA", f"rank {trainer.lora.rank}, alpha {trainer.lora.alpha:g}"
    for row in _evaluations(run, step):
        of_set = f" of {row['name']}" if row.get("name") else ""
        yield (
            f"accuracy{of_set} at step {row['step']}",
            f"{row['accuracy']:.3f} (pass@1, {row['num_prompts']} held-out prompts)",
        )


def _names(run: Path, config: RunConfig) -> dict[str, tuple[HubName, str]]:
    """Returns Hub names and their commits, by setting. A path that looks like a name has no recorded commit."""
    commits = commits_of(run)
    rows = ((one.option, HubName.of(one.path), commits.get(one.key, "")) for one in named(config))
    return {option: (name, commit) for option, name, commit in rows if name and commit}


def _evaluations(run: Path, step: int) -> list[dict[str, Any]]:
    """Returns the first and the last evaluation with a verdict of each set, up to a step. Empty means no metrics."""
    if not (metrics := run / "metrics.jsonl").exists():
        return []
    rows = (row for _, row in read_run_rows(metrics, "give the folder of a run") if row.get("kind") == "eval")
    sets = dict[str | None, dict[int, dict[str, Any]]]()
    for row in rows:
        if row["step"] <= step and row["accuracy"] is not None:
            sets.setdefault(row.get("name"), {})[row["step"]] = row
    return [by_step[at] for by_step in sets.values() for at in sorted({min(by_step), max(by_step)})]
