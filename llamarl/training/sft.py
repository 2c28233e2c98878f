"""Supervised warm start: a small base model from scratch, its tokenizer included, in about a minute on two cores.

Worked solutions are packed into rows; only solution tokens are learnt, and documents of a row do not see each other.
Matrices inside the layers follow Muon, the rest AdamW: a small model learns the form of the answers several times
sooner than with AdamW alone.

Shape suffixes: B rows of a step, T tokens of a row, N = B * T packed tokens, L label positions, H heads, J key/value
heads, K head dim, V vocabulary.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.config.errors import ConfigError
from llamarl.config.ref import build
from llamarl.config.sft import SftConfig
from llamarl.data.prompts import SOURCES, fill_template
from llamarl.data.sampler import PromptSampler
from llamarl.data.sources import ProblemRow, ProblemSource
from llamarl.data.tokenizer import Tokenizer, train_byte_bpe
from llamarl.models.hf import new_model, save_model
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Attend, Transformer
from llamarl.training.base_model import RECORD_FILE, settings_hash
from llamarl.training.muon import Muon

NO_LABEL = -100
WARMUP_STEPS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class SftProgress:
    """One optimizer step of a warm start."""

    step: int
    """Finished steps, from 1."""
    steps: int
    """Steps in all."""
    loss: float
    """Mean negative log-likelihood of a solution token, in nats."""
    num_tokens: int
    """Tokens of the step's documents, questions included."""
    elapsed_s: float
    """Seconds since the first step began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """Documents of one step, placed in rows."""

    token_ids_B_T: Tensor
    """int64; 0 where a row is not full."""
    labels_B_T: Tensor
    """int64: the next token where it belongs to a solution, else NO_LABEL."""
    positions_B_T: Tensor
    """int64: position in the document."""
    documents_B_T: Tensor
    """int64: number of the document in its step, -1 where the row is not full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A question with its worked solution."""

    token_ids_T: np.ndarray
    """Question, solution, end-of-text, int32 [T]."""
    num_prompt: int
    """Tokens of the question."""


def run_sft(config: SftConfig, progress: Callable[[SftProgress], None] | None = None) -> Path:
    """Trains tokenizer and model, and writes them to `config.output` as one Hugging Face folder, or not at all.

    Args:
        config: the warm start.
        progress: called after each step.

    Raises:
        ConfigError: the output exists, the source has no solutions, or a document does not fit.
    """
    output = Path(config.output)
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"output = {config.output!r} exists and is not empty; delete it or choose another folder")
    source: ProblemSource = build(config.source, SOURCES, "source")
    texts = [_texts(source[i], config.template) for i in range(len(source))]
    output.parent.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as work:
            tokenizer_texts = (question + solution for question, solution in texts)
            tokenizer = train_byte_bpe(tokenizer_texts, Path(work, "tokenizer"), config.shape.vocab_size)
            model = new_model(_shape(config, tokenizer), config.seed, config.shape.init_std)
            _train(model, _documents(texts, tokenizer, config), config, progress)
            made = Path(work, "model")
            save_model(model, made, tokenizer.folder)
            record = {"settings_hash": settings_hash(config), "settings": config.model_dump(mode="json")}
            (made / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            os.replace(made, output)
    finally:
        torch.set_num_threads(threads)
    return output


def _texts(row: ProblemRow, template: str) -> tuple[str, str]:
    if not isinstance(row.solution, str) or not row.solution:
        raise ConfigError(f"source: row {row.problem_id!r} has no `solution` text to learn from; every row needs one")
    return fill_template(row, template), row.solution


def _shape(config: SftConfig, tokenizer: Tokenizer) -> ModelShape:
    shape = config.shape
    if shape.hidden_size % shape.num_heads or shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"shape: hidden_size = {shape.hidden_size} must be a multiple of num_heads = {shape.num_heads}, "
            f"and that of num_kv_heads = {shape.num_kv_heads}"
        )
    return ModelShape(
        family=shape.family,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        intermediate_size=shape.intermediate_size,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=shape.max_position_embeddings,
        tie_embeddings=True,
        stop_token_ids=tokenizer.eos_token_ids,
    )


def _documents(texts: list[tuple[str, str]], tokenizer: Tokenizer, config: SftConfig) -> list[Document]:
    """Question and solution are tokenized apart, as a prompt and a response are in the run that follows."""
    end = np.array([tokenizer.eos_token_ids[0]], dtype=np.int32)
    questions = tokenizer.encode_batch([question for question, _ in texts])
    solutions = tokenizer.encode_batch([solution for _, solution in texts])
    limit = min(config.row_tokens, config.shape.max_position_embeddings)
    documents = []
    for question_T, solution_T in zip(questions, solutions, strict=True):
        document = Document(token_ids_T=np.concatenate((question_T, solution_T, end)), num_prompt=len(question_T))
        if len(document.token_ids_T) > limit:
            raise ConfigError(
                f"source: a document has {len(document.token_ids_T)} tokens and {limit} fit; raise row_tokens = "
                f"{config.row_tokens} and shape.max_position_embeddings = {config.shape.max_position_embeddings}"
            )
        documents.append(document)
    return documents


def _train(
    model: Transformer,
    documents: list[Document],
    config: SftConfig,
    progress: Callable[[SftProgress], None] | None,
) -> None:
    optimizers = _optimizers(model, config)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _decay(step, config.steps)) for o in optimizers]
    batches = pack(documents, config.rows, config.row_tokens, config.seed)
    begin = time.monotonic()
    for step in range(1, config.steps + 1):
        batch = next(batches)
        loss = _loss(model, batch)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if progress is not None:
            num_tokens = int((batch.documents_B_T >= 0).sum())
            elapsed_s = time.monotonic() - begin
            progress(
                SftProgress(step=step, steps=config.steps, loss=loss.item(), num_tokens=num_tokens, elapsed_s=elapsed_s)
            )


def _optimizers(model: Transformer, config: SftConfig) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers." in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(matrices, lr=config.muon_learning_rate),
        torch.optim.AdamW(others, lr=config.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def _decay(step: int, steps: int) -> float:
    """Linear up over WARMUP_STEPS, then linear down to almost 0."""
    return min((step + 1) / WARMUP_STEPS, (steps - step) / steps)


def _loss(model: Transformer, batch: PackedRows) -> Tensor:
    """Mean negative log-likelihood of the step's solution tokens."""
    labels_N = batch.labels_B_T.flatten()
    label_positions_L = (labels_N != NO_LABEL).nonzero().squeeze(1)
    hidden_N_D = model(batch.token_ids_B_T.flatten(), batch.positions_B_T.flatten(), attend_rows(batch.documents_B_T))
    logits_L_V = model.logits(hidden_N_D.index_select(0, label_positions_L))
    return F.cross_entropy(logits_L_V, labels_N[label_positions_L])


def attend_rows(documents_B_T: Tensor) -> Attend:
    """Causal attention within each document of each row.

    Rows of one length with a block-diagonal mask make one batched call, which on CPUs beats a call per document.
    """
    rows, _ = documents_B_T.shape
    same_B_T_T = documents_B_T[:, :, None] == documents_B_T[:, None, :]
    mask_B_1_T_T = same_B_T_T.tril()[:, None]

    def attend(_layer: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q_N_H_K, k_N_J_K, v_N_J_K))
        out_B_H_T_K = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B_1_T_T, enable_gqa=True)
        return out_B_H_T_K.transpose(1, 2).flatten(0, 1)

    return attend


def pack(documents: list[Document], rows: int, row_tokens: int, seed: int) -> Iterator[PackedRows]:
    """Steps without end. A document goes to the first row that has room; one that finds none opens the next step."""
    sampler = PromptSampler(len(documents), seed)
    document = documents[sampler.next()]
    while True:
        token_ids, positions = np.zeros((2, rows, row_tokens), np.int64)
        labels, numbers = np.full((rows, row_tokens), NO_LABEL), np.full((rows, row_tokens), -1)
        used, count = np.zeros(rows, np.int64), 0
        while (length := len(document.token_ids_T)) <= row_tokens - used.min():
            row = int(np.argmax(used + length <= row_tokens))
            begin, end = used[row], used[row] + length
            token_ids[row, begin:end] = document.token_ids_T
            positions[row, begin:end] = np.arange(length)
            numbers[row, begin:end] = count
            labels[row, begin + document.num_prompt - 1 : end - 1] = document.token_ids_T[document.num_prompt :]
            used[row], count = end, count + 1
            document = documents[sampler.next()]
        yield PackedRows(
            token_ids_B_T=torch.from_numpy(token_ids),
            labels_B_T=torch.from_numpy(labels),
            positions_B_T=torch.from_numpy(positions),
            documents_B_T=torch.from_numpy(numbers),
        )
