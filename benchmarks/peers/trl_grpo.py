"""TRL's GRPOTrainer on the task of a run file; runs in TRL's own environment (see compare_trl.py).

The settings are those of the run file: same model, prompts, group size, sampling and AdamW. `loss_type = "dapo"`
is a mean over tokens, `scale_rewards = False` leaves reward minus group mean, `beta = 0` is without reference model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from examples.real import calculation
from llamarl.rewards.gsm8k import Gsm8k
from llamarl.types import RewardItem


def reward_of(settings: dict[str, Any]) -> Callable[..., list[float]]:
    """Returns the reward of the run. TRL has no stop strings, so responses are cut at the first one."""

    def cut(text: str) -> str:
        places = [text.find(stop) for stop in settings["stop_strings"] if stop in text]
        return text[: min(places)] if places else text

    def gsm8k(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
        items = [
            RewardItem(prompt=prompt, response=cut(text), answer=gold, metadata={})
            for prompt, text, gold in zip(prompts, completions, answer, strict=True)
        ]
        return [result.value for result in Gsm8k().score(items)]

    def calculated(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [
            float(calculation.reward(cut(text), float(gold))) for text, gold in zip(completions, answer, strict=True)
        ]

    return gsm8k if settings["reward"] == "gsm8k" else calculated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="JSONL with `prompt` and `answer`")
    parser.add_argument("--settings", required=True, help="JSON with the demo's settings")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    settings = json.loads(arguments.settings)
    rows = [json.loads(line) for line in Path(arguments.prompts).read_text().splitlines()]
    batch = settings["group_size"] * settings["prompts_per_step"]
    config = GRPOConfig(
        output_dir=arguments.output,
        max_steps=settings["steps"],
        seed=settings["seed"],
        num_generations=settings["group_size"],
        per_device_train_batch_size=batch // settings["accumulation"],
        gradient_accumulation_steps=settings["accumulation"],
        max_completion_length=settings["max_new_tokens"],
        temperature=settings["temperature"],
        top_k=0,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=settings["beta1"],
        adam_beta2=settings["beta2"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        beta=0.0,
        loss_type="dapo",
        scale_rewards=False,
        bf16=settings["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model),
        processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
        reward_funcs=reward_of(settings),
        args=config,
        train_dataset=Dataset.from_list(rows),
    )
    start_s = time.monotonic()
    trainer.train()
    wall_s = time.monotonic() - start_s
    trainer.save_model(arguments.output)
    log = [row for row in trainer.state.log_history if "reward" in row]
    figures = {"wall_s": wall_s, "rewards": [row["reward"] for row in log]}
    Path(arguments.output, "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
