"""The native engine as a worker: python ours.py MODEL_FOLDER DTYPE SLOTS"""

from __future__ import annotations

import cProfile
import pstats
import sys
from typing import Any

import numpy as np
import torch
from work import Run, Workload, serve

from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel
from llamarl.models.folder import load_shape
from llamarl.models.hf import load_model
from llamarl.types import FinishReason, GenerationRequest, SamplingParams

PREFILL_TOKENS = 512


def requests(work: Workload) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            group_id=i,
            prompt_token_ids_T=np.array(prompt, np.int32),
            group_size=work.group_size,
            sampling=SamplingParams(max_new_tokens=count, seed=work.seed),
        )
        for i, (prompt, count) in enumerate(zip(work.prompts, work.new_tokens, strict=True))
    ]


def generate(engine: Engine, work: Workload) -> dict[str, Any]:
    """Runs everything; the share of decode slots filled while rollouts waited."""
    before, tokens = engine.stats(), 0
    engine.submit(requests(work))
    while engine.has_work:
        for rollout in engine.step():
            assert rollout.finish_reason == FinishReason.LENGTH, rollout.error
            tokens += rollout.num_tokens
    assert tokens == work.num_new_tokens
    after = engine.stats()
    slots = after.slot_steps - before.slot_steps
    fill = (after.filled_slot_steps - before.filled_slot_steps) / slots if slots else None
    return {"slot_fill": fill, "steps": after.steps - before.steps}


def profiled(engine: Engine, work: Workload) -> dict[str, Any]:
    """The functions with most time of their own, and their shares."""
    profiler = cProfile.Profile()
    profiler.runcall(generate, engine, work)
    stats = pstats.Stats(profiler)
    total_s = stats.total_tt  # pyrefly: ignore
    own = sorted(((row[2], key) for key, row in stats.stats.items()), reverse=True)[:12]  # pyrefly: ignore
    return {
        "profile": [[f"{'/'.join(file.split('/')[-2:])}:{name}", own_s / total_s] for own_s, (file, _, name) in own]
    }


def start() -> tuple[int, Run]:
    folder, dtype, slots = sys.argv[1:4]
    run = profiled if "profile" in sys.argv else generate
    torch.set_num_threads(1)
    model = GeneratorModel(load_shape(folder), dtype, "cpu")
    model.load(load_model(folder, torch.float32, "cpu"))
    engine = Engine(model, EngineSettings(max_running=int(slots), prefill_tokens=PREFILL_TOKENS, kv_bytes=None))
    return (model.shape.vocab_size, lambda work: run(engine, work) | {"path": model.multiplies_by})


if __name__ == "__main__":
    serve(start)
