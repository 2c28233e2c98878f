"""vLLM in one process as a worker, under its own interpreter: python vllm_offline.py MODEL_FOLDER DTYPE SLOTS"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, whose CPU time is counted
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

import torch
import vllm
from vllm import LLM, SamplingParams
from work import Run, Workload, serve

PREFILL_TOKENS = 512


def start() -> tuple[int, Run]:
    folder, dtype, slots = sys.argv[1:4]
    torch.set_num_threads(1)
    llm = LLM(
        folder, dtype=dtype, skip_tokenizer_init=True, max_num_seqs=int(slots), disable_log_stats=True,
        max_num_batched_tokens=PREFILL_TOKENS + int(slots), logprobs_mode="processed_logprobs", seed=0,
    )  # fmt: skip

    def run(work: Workload) -> dict[str, Any]:
        params = [
            SamplingParams(n=work.group_size, max_tokens=count, logprobs=0, ignore_eos=True, detokenize=False)
            for count in work.new_tokens
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in work.prompts], params, use_tqdm=False)
        assert sum(len(one.token_ids) for output in outputs for one in output.outputs) == work.num_new_tokens
        return {"version": vllm.__version__}

    return llm.llm_engine.model_config.get_vocab_size(), run


if __name__ == "__main__":
    serve(start)
