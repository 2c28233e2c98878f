"""`train_byte_bpe`: trains the tokenizer of a model from scratch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from llamarl.config import ConfigError
from llamarl.data.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Tokenizer


def train_byte_bpe(
    texts: Iterable[str], folder: str | Path, vocab_size: int, eos_token: str = "<|endoftext|>"
) -> Tokenizer:
    """Trains a byte-level BPE with single digits and writes it to `folder` in Hugging Face format.

    Args:
        texts: training texts. Other text still encodes, by its bytes.
        folder: destination of `tokenizer.json` and `tokenizer_config.json`.
        vocab_size: maximum size, at least 257: the bytes and `eos_token`.
        eos_token: the only special token, also used for padding.
    """
    if vocab_size < 257:
        raise ConfigError(f"vocab_size = {vocab_size} cannot hold 256 bytes and the end-of-text token; use 257 or more")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "pad_token": eos_token,
        "clean_up_tokenization_spaces": False,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Tokenizer(folder)
