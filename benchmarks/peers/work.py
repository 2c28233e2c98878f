"""What the engines of `benchmarks/generation.py` are given, and how they are asked. Needs numpy only: each engine runs
in an interpreter of its own and imports this file from beside it.

A worker reads one JSON line per run from stdin and answers with one. One worker computes at a time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts and the number of tokens that each response gets: models are random, so nothing else ends it."""

    prompts: list[list[int]]
    new_tokens: list[int]
    group_size: int = 1
    """Responses to each prompt; they have the same number of tokens."""
    seed: int = 0

    @property
    def num_new_tokens(self) -> int:
        return sum(self.new_tokens) * self.group_size


def workload(name: str, vocab_size: int, scale: float, seed: int) -> Workload:
    """`scale` shortens everything, for a smoke test.

    uniform-N: N prompts of 64 to 256 tokens, 128 to 256 new ones. long_tail-N: 4 N prompts for N slots, of which every
    eighth gets 256 new tokens and the others 32. grouped and ungrouped: 16 prompts of 192 tokens, 8 responses of 192
    each, as groups or as 128 requests.
    """
    rng = np.random.default_rng(1)  # lengths are the same in all repeats
    kind, _, count = name.partition("-")
    if kind == "uniform":
        prompt_tokens, new_tokens = rng.integers(64, 257, int(count)), rng.integers(128, 257, int(count))
    elif kind == "long_tail":
        prompt_tokens = rng.integers(64, 257, 4 * int(count))
        new_tokens = rng.permutation(np.where(np.arange(4 * int(count)) % 8, 32, 256))
    else:
        prompt_tokens = new_tokens = np.full(16, 192)
    rng = np.random.default_rng(seed)  # tokens are not: nobody finds a prompt of the last repeat in a cache
    prompts = [rng.integers(1, vocab_size, max(1, int(count * scale))).tolist() for count in prompt_tokens]
    new = [max(1, int(count * scale)) for count in new_tokens]
    if kind == "ungrouped":
        prompts, new = ([one for one in part for _ in range(8)] for part in (prompts, new))
    return Workload(prompts=prompts, new_tokens=new, group_size=8 if kind == "grouped" else 1, seed=seed)


Run = Callable[[Workload], dict[str, Any]]
"""Generates everything; may say more about it."""


def serve(start: Callable[[], tuple[int, Run]]) -> None:
    """Answer until stdin ends. CPU time is that of all threads of this process, which has no children that compute.

    `start` loads the model and gives the size of its vocabulary and what runs it.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not look like an answer
    vocab_size, run = start()
    for line in sys.stdin:
        work = workload(vocab_size=vocab_size, **json.loads(line))
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        extra = run(work)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        answers.write(json.dumps({"tokens": work.num_new_tokens, "cpu_s": cpu_s, "wall_s": wall_s, **extra}) + "\n")
