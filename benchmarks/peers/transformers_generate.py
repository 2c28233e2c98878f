"""`generate` of transformers as a worker: python transformers_generate.py MODEL_FOLDER DTYPE SLOTS

Prompts are padded on the left to batches of SLOTS in the order given; a batch goes on until its longest response is
done. Log-probabilities of the sampled tokens are taken from the scores, as the other engines give them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from work import Run, Workload, serve


class Logprobs(LogitsProcessor):
    """Of the tokens that the last step sampled; keeps one step's scores only."""

    def __init__(self) -> None:
        self.logprobs: list[torch.Tensor] = []
        self._last: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self._last is not None:
            self.logprobs.append(self._last.gather(1, input_ids[:, -1:]))
        self._last = scores.float().log_softmax(-1)
        return scores


def start() -> tuple[int, Run]:
    folder, dtype, slots = sys.argv[1:4]
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")

    @torch.inference_mode()
    def run(work: Workload) -> dict[str, Any]:
        torch.manual_seed(work.seed)
        rows = list(zip(work.prompts, work.new_tokens, strict=True))
        for first in range(0, len(rows), int(slots)):
            prompts, counts = zip(*rows[first : first + int(slots)], strict=True)
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            logprobs = Logprobs()
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=max(counts), min_new_tokens=max(counts), do_sample=True,
                temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None,
                logits_processor=LogitsProcessorList([logprobs]),
            )  # fmt: skip
            assert out.shape[1] == width + max(counts)
        return {"version": transformers.__version__}

    return model.config.vocab_size, run


if __name__ == "__main__":
    serve(start)
