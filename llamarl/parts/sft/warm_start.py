"""Supervised warm start: trains a small base model and its tokenizer from scratch, in about a minute on two cores.

Muon optimizes matrices inside the layers, AdamW the rest. A small model learns the format of answers several times
faster than with AdamW only.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from llamarl.config.errors import ConfigError, did_you_mean
from llamarl.config.ref import Ref, build
from llamarl.config.roles import TrainerConfig
from llamarl.config.sft import SftConfig, ShapeConfig
from llamarl.data.prompts import SOURCES, left_out, render_text
from llamarl.data.sources import ProblemSource
from llamarl.data.tokenizer import Tokenizer
from llamarl.models.hf import new_model, save_model
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.parts.sft.bpe import train_byte_bpe
from llamarl.parts.sft.documents import filled, num_tokens, reply_of, to_documents
from llamarl.parts.sft.muon import Muon
from llamarl.parts.sft.supervised import Supervised
from llamarl.run.hub_pins import resolved_data
from llamarl.sharding.tensor_parallel import is_router
from llamarl.training.base_model import RECORD_FILE, made_by, settings_hash
from llamarl.types import SampleGroup

WARMUP_STEPS = 10
UNCLIPPED = 1e9
BALANCE = 0.01
"""Weight of the loss that balances the load of experts (Switch Transformer, section 2.2)."""
Progress = Callable[[int, Mapping[str, float]], None]
"""Called after each step with the number of finished steps and the step's metrics."""


def warm_start(config: SftConfig, progress: Progress | None = None) -> Path:
    """Trains tokenizer and model, and writes them to `config.output` as one Hugging Face folder, atomically.

    Raises:
        ConfigError: the output exists, the source has no solutions, or a document does not fit.
    """
    output = Path(config.output)
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"output = {config.output!r} exists and is not empty; delete it or choose another folder")
    pinned = resolved_data(config.source, "source", command="llamarl sft")
    source: ProblemSource = build(pinned, SOURCES, "source")
    rows = [source[i] for i in range(len(source))]
    for said in left_out(source, "source"):
        sys.stderr.write(f"llamarl sft: {said}\n")
    prompts = [render_text(row, config.template) for row in rows]
    solutions = [reply_of(row, "source")["content"] for row in rows]
    output.parent.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as work:
            tokenizer_texts = (prompt + solution for prompt, solution in zip(prompts, solutions, strict=True))
            tokenizer = train_byte_bpe(tokenizer_texts, Path(work, "tokenizer"), config.shape.vocab_size)
            model = new_model(_shape(config, tokenizer), config.seed, config.shape.init_std)
            documents = list(to_documents(tokenizer.encode_batch(prompts), solutions, tokenizer))
            _check_lengths(documents, config)
            _train(model, documents, config, progress)
            made = Path(work, "model")
            save_model(model, made, tokenizer.folder)
            settings = config.model_copy(update={"source": pinned})  # the hash is that of the file, which has no commit
            record = {"settings_hash": settings_hash(config), "settings": settings.model_dump(mode="json")}
            (made / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            _put(made, output, record["settings_hash"])
    finally:
        torch.set_num_threads(threads)
    return output


def _put(made: Path, output: Path, digest: object) -> None:
    """Moves a finished model to its folder, unless another process has made the same model there meanwhile. Raises
    ConfigError: the folder holds something else."""
    try:
        os.replace(made, output)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if made_by(output) == digest:
            return
        raise ConfigError(
            f"output = {str(output)!r} was made by another process meanwhile, with other settings; delete it or choose "
            "another folder"
        ) from None


def _shape(config: SftConfig, tokenizer: Tokenizer) -> ModelShape:
    shape = config.shape
    if shape.hidden_size % shape.num_heads or shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"shape: hidden_size = {shape.hidden_size} must be a multiple of num_heads = {shape.num_heads}, "
            f"and that of num_kv_heads = {shape.num_kv_heads}"
        )
    if isinstance(shape.family, Ref):
        return _mixture(shape, shape.family, tokenizer)
    return ModelShape(
        **shape.model_dump(exclude={"vocab_size", "init_std"}),
        head_dim=shape.hidden_size // shape.num_heads,
        vocab_size=tokenizer.vocab_size,
        tie_embeddings=True,
        stop_token_ids=tokenizer.eos_token_ids,
    )


def _mixture(shape: ShapeConfig, family: Ref, tokenizer: Tokenizer) -> ModelShape:
    """Returns the shape of a mixture of experts, from the keys of its `config.json`."""
    of_shape = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": True,
        "eos_token_id": list(tokenizer.eos_token_ids),
    }
    try:
        found = ModelShape.from_hf({**family.options, **of_shape, "model_type": family.name})
    except ConfigError as error:
        raise ConfigError(f"shape.family = {family.name!r}: {error}") from None
    known = sorted(found.to_hf().keys() - of_shape.keys())
    for name in sorted(family.options.keys() - known):
        raise ConfigError(f"`shape.family.{name}` is not an option of `{family.name}`; {did_you_mean(name, known)}")
    return found


def _check_lengths(documents: list[SampleGroup], config: SftConfig) -> None:
    longest, limit = max(map(num_tokens, documents)), min(config.row_tokens, config.shape.max_position_embeddings)
    if longest > limit:
        raise ConfigError(
            f"source: a document has {longest} tokens and {limit} fit; raise row_tokens = {config.row_tokens} and "
            f"shape.max_position_embeddings = {config.shape.max_position_embeddings}"
        )


def _train(model: Transformer, documents: list[SampleGroup], config: SftConfig, progress: Progress | None) -> None:
    step_tokens = config.rows * config.row_tokens
    settings = TrainerConfig(
        learning_rate=config.adamw_learning_rate,
        warmup_steps=min(WARMUP_STEPS, config.steps) - 1,
        decay="linear",
        decay_steps=config.steps,
        max_grad_norm=UNCLIPPED,
        microbatch_tokens=step_tokens,
    )
    supervised = Supervised(model, settings, balance=BALANCE)
    supervised.optimizer = _optimizer(model, config)
    batches = filled(documents, step_tokens, config.seed)
    for step in range(1, config.steps + 1):
        result = supervised.step(next(batches))
        if progress is not None:
            progress(step, result.metrics)


def _optimizer(model: Transformer, config: SftConfig) -> torch.optim.Optimizer:
    named = model.named_parameters()
    matrices = [
        p for name, p in named if p.ndim >= 2 and "layers." in name and not is_router(name) and ".conv_" not in name
    ]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    adamw = torch.optim.AdamW(others, config.adamw_learning_rate, (0.9, 0.95), weight_decay=0.0, fused=True)
    return Muon(matrices, config.muon_learning_rate, adamw)
