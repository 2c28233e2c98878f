"""TRL's GRPO on the task, model and settings of `real.py`, on the same card. Needs the package `trl` there.

python benchmarks/gpu/trl_on_card.py [--device cuda:0] [--limit_s 60]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from shapes import say

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
CONFIG = ROOT / "examples/real/svamp.toml"
MODEL = ROOT / "runs/base/smollm2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--limit_s", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--eval", type=int, default=0, help="is not used: as in real.py")
    options = parser.parse_args()
    say({"run": "trl", "device": options.device}, lambda: trained(options))


def prompts(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the prompts of the run file as conversations."""
    begun = [{"role": "system", "content": data["system"]}]
    for example in data["examples"]:
        begun.append({"role": "user", "content": example["question"]})
        begun.append({"role": "assistant", "content": example["answer"]})
    paths = [ROOT / source["path"] for source in data["train"]]
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [
        {"prompt": [*begun, {"role": "user", "content": row["question"]}], "answer": str(row["answer"])} for row in rows
    ]


def trained(options: argparse.Namespace) -> dict[str, Any]:
    """Steps until the time is over, and samples per second without the first step."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from examples.real import calculation
    from llamarl.config.load import load_config

    config = load_config(CONFIG)
    rollout, trainer, ends = config.rollout, config.trainer, list[float]()
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    rows = InMemoryTable.from_pylist(prompts(tomllib.loads(CONFIG.read_text())["data"]))
    data = Dataset(rows, fingerprint="svamp")  # without one, `datasets` pickles classes of pyarrow, which may fail

    def cut(text: str) -> str:  # TRL has no stop strings
        places = [text.find(stop) for stop in rollout.stop_strings if stop in text]
        return text[: min(places)] if places else text

    class Until(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.monotonic())
            if len(ends) > 1:
                print(json.dumps({"run": "trl", "device": options.device} | figures(ends, batch)), flush=True)
            control.should_training_stop |= ends[-1] - ends[0] > options.limit_s

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [cut(one if isinstance(one, str) else one[0]["content"]) for one in completions]
        return [float(calculation.reward(text, float(gold))) for text, gold in zip(texts, answer, strict=True)]

    batch = rollout.group_size * options.prompts
    settings = GRPOConfig(
        output_dir="/tmp/trl-card", max_steps=options.steps, num_generations=rollout.group_size,
        per_device_train_batch_size=batch, max_completion_length=rollout.max_new_tokens, temperature=1.0,
        learning_rate=trainer.learning_rate, beta=0.0, loss_type="dapo", scale_rewards=False, bf16=True,
        use_cpu=options.device == "cpu", logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    grpo = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model), processing_class=tokenizer, reward_funcs=reward,
        args=settings, train_dataset=data, callbacks=[Until()],
    )  # fmt: skip
    grpo.train()
    rewards = [row["reward"] for row in grpo.state.log_history if "reward" in row]
    return figures(ends, batch) | {"rewards": rewards}


def figures(ends: list[float], batch: int) -> dict[str, Any]:
    """The speed until now, without the first step. A run that is cut off has those of its last step."""
    seconds = (ends[-1] - ends[0]) / max(len(ends) - 1, 1)
    return {"steps": len(ends), "step_s": seconds, "samples_per_s": batch / seconds if seconds else None}


if __name__ == "__main__":
    main()
