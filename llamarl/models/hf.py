"""Hugging Face folders: config.json, safetensors and tokenizer files, read and written without transformers."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from llamarl.config import ConfigError, open_own, read_json
from llamarl.config.hub import folder_of
from llamarl.models.file_parts import FileLayout
from llamarl.models.folder import CONFIG, GENERATION_CONFIG, WEIGHTS, load_shape, opened
from llamarl.models.hybrid import text_config
from llamarl.models.shape import ARCHITECTURES, ModelShape, hf_eos
from llamarl.models.tensors import EMBEDDING, HEAD, LAST_NORM, Headers
from llamarl.models.transformer import Transformer
from llamarl.observability.files import sync
from llamarl.sharding.box import Box
from llamarl.sharding.tensor_parallel import is_expert, is_router

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
Read = Callable[[str, Box], Tensor]
"""read(name, part): returns that part of a weight."""
_WRITTEN = {CONFIG, GENERATION_CONFIG, WEIGHTS, *TOKENIZER_FILES}
README = "README.md"
CARD_MARK = "<!-- Written by `llamarl export`, which replaces this file while this line stays. -->"
"""Line of a README.md that marks an export's, which may be replaced."""
_SMALL_SUFFIXES = {"", ".jinja", ".json", ".md", ".model", ".py", ".tiktoken", ".txt"}
"""Suffixes of further files of a model: licenses, vocabularies, templates, settings."""
_SMALL_BYTES = 64 << 20
"""Largest size of such a file."""
_DTYPE_KEYS = ("torch_dtype", "dtype")
"""Keys of config.json that name the type of the weights, in transformers 4 and 5."""


def new_model(shape: ModelShape, seed: int, std: float) -> Transformer:
    """Returns an initialized float32 model on the CPU."""
    with torch.device("meta"):
        model = Transformer(shape)
    empty = {name: torch.empty(weight.shape) for name, weight in model.state_dict().items()}
    model.load_state_dict(empty, assign=True)
    model.initialize(seed, std)
    return model


class Weights(Headers):
    """The tensors of a Hugging Face folder. Any part can be read; all names and shapes have been checked."""

    def read(self, name: str, box: Box) -> Tensor:
        """Returns a part of a tensor in the type of its file, maybe in its mapped memory; zeros for a missing optional
        tensor.

        Raises:
            ConfigError: it holds NaN or infinity, or only 0 although all tokens pass through it, or it is a part of
                tied embeddings that differs from the checkpoint's head.
        """
        names = self._names[name]
        if is_expert(name):
            part = self._experts(name, names, box)
        elif names[0] not in self._files:
            return torch.zeros(box.shape)
        else:
            joined, file = self.layout.joined(name), (self._files[names[0]], self._stored[names[0]])
            part = _part(*file, box) if joined is None else _some_rows(*file, joined.rows_N, box)
        if not torch.isfinite(part).all():
            raise ConfigError(f"{self._folder}: `{name}` holds NaN or infinity; copy or make the checkpoint again")
        if name == LAST_NORM and part.numel() and not part.any() and not self._shape.is_hybrid:
            raise ConfigError(
                f"{self._folder}: `{name}` is 0 throughout, so all tokens are equally likely; copy it again"
            )
        if name == EMBEDDING and self._is_tied and self.other_head is not None:
            self.check_tied_head(torch.equal(_part(self.other_head, HEAD, box).float(), part.float()))
        return part

    def _experts(self, name: str, names: Sequence[str], box: Box) -> Tensor:
        """Returns parts of the matrices of some experts, stacked. Reads nothing else."""
        of_all = self.layout.all_experts(name, self._shapes[name])
        if of_all is not None and of_all[0] in self._files:
            file, first, _ = of_all
            rows = Box(
                (box.starts[0], first + box.starts[1], box.starts[2]),
                (box.stops[0], first + box.stops[1], box.stops[2]),
            )
            return _part(self._files[file], self._stored[file], rows)
        chosen = names[box.starts[0] : box.stops[0]]
        with ExitStack() as leaving:
            files = {path: leaving.enter_context(opened(path)) for path in {self._files[name] for name in chosen}}
            slices = [files[self._files[name]].get_slice(self._stored[name]) for name in chosen]
            inner = Box(box.starts[1:], box.stops[1:])
            return torch.stack([matrix[inner.within(Box.whole(matrix.get_shape()))] for matrix in slices])

    def read_all(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """Returns copies of whole tensors, routers in float32 at least.

        Copies, because tensors in the mapped file are not aligned for fast products, and the file may change.
        """
        exact = torch.promote_types(dtype, torch.float32)
        return {
            name: self.read(name, Box.whole(shape)).to(device, exact if is_router(name) else dtype, copy=True)
            for name, shape in self._shapes.items()
        }


def open_model(folder: str | Path) -> tuple[Transformer, Weights]:
    """Returns the model in `folder` on the meta device, and its weights, from one safetensors file or from shards with
    an index.

    Raises:
        ConfigError: see `Weights`.
    """
    with torch.device("meta"):
        model = Transformer(load_shape(folder))
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return model, Weights(folder_of(folder), model.shape, expected, is_tied=model.lm_head is None)


def load_model(folder: str | Path, dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """Returns the whole model in `folder`.

    Raises:
        ConfigError: see `Weights` and `Weights.read`.
    """
    model, weights = open_model(folder)
    model.load_state_dict(weights.read_all(dtype, device), assign=True)
    return model


def save_model(model: Transformer, folder: str | Path, tokenizer_folder: str | Path | None) -> None:
    """Writes `model` as a folder that transformers loads, with the tokenizer files of `tokenizer_folder`, if there is
    one.

    Sharded parameters must be gathered first: see `save_tensors`.
    """
    save_tensors(model.state_dict(), model.shape, folder, tokenizer_folder)


def save_tensors(
    tensors: Mapping[str, Tensor],
    shape: ModelShape,
    folder: str | Path,
    tokenizer_folder: str | Path | None,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes whole tensors, named as in `Transformer.state_dict()`, as a Hugging Face folder, atomically.

    An older export in `folder` is replaced.

    Args:
        base: folder of the model that was trained. Its small files and the keys of its config.json are copied.
        dtype: type of the matrices in the file. Norms, biases and routers, which the generator computes with in
            float32, keep theirs. None means that all tensors keep their type.
        texts: contents of further files by name. They replace files of `base` and of the tokenizer.

    Raises:
        ConfigError: `folder` holds other files, which replacing it would delete, or there is no tokenizer to copy.
    """
    if tokenizer_folder and not (folder_of(tokenizer_folder) / TOKENIZER_FILES[0]).is_file():
        raise ConfigError(f"{tokenizer_folder} has no {TOKENIZER_FILES[0]}; name the folder of the tokenizer")
    small = small_files(base) if base else []
    with replaced_folder(Path(folder), {*_WRITTEN, *texts, *(path.name for path in small)}) as new:
        for path in small:
            shutil.copyfile(path, new / path.name)
        if tokenizer_folder:
            copy_tokenizer(tokenizer_folder, new)
        whole = _as_in_files(tensors, FileLayout(shape), dtype)
        try:
            save_file(whole, new / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise ConfigError(f"cannot write to {folder}: {error}; name a folder on a disk with room") from None
        written = str(whole[EMBEDDING].dtype).removeprefix("torch.")
        write_json(new / CONFIG, _config_json(shape, base, written))
        (new / WEIGHTS).chmod((new / CONFIG).stat().st_mode)  # safetensors makes it readable for its owner only
        if not (new / GENERATION_CONFIG).exists():
            write_json(new / GENERATION_CONFIG, _generation_config(shape))
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")


def _as_in_files(tensors: Mapping[str, Tensor], layout: FileLayout, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Returns tensors of a model by their names in files; see `save_tensors`."""
    whole = dict[str, Tensor]()
    for name, tensor in tensors.items():
        copied = tensor.detach().cpu().contiguous()
        if dtype is not None and copied.ndim > 1 and not is_router(name):
            copied = copied.to(dtype)
        if (joined := layout.joined(name)) is not None:
            into = whole.setdefault(joined.name, copied.new_empty(joined.sizes))
            into[torch.from_numpy(joined.rows_N)] = copied.view(-1, *joined.sizes[1:])
            continue
        parts = copied.unbind() if is_expert(name) else [copied]
        whole |= zip(layout.names(name, copied.shape), parts, strict=True)
    return whole


def small_files(base: str | Path) -> list[Path]:
    """Returns the files of a model's folder that an export copies, by name: all but weights, config.json, README.md and
    records of llamarl.

    Links out of the folder are skipped, except those of the Hub's cache, because an export may be published.
    """
    folder = folder_of(base)
    real = folder.resolve()
    root = real.parents[1] if real.parent.name == "snapshots" else real
    return sorted(
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.is_file()
        and (path.name in TOKENIZER_FILES or path.resolve().is_relative_to(root))
        and path.suffix in _SMALL_SUFFIXES
        and not path.name.startswith((".", "llamarl", "adapter_"))
        and not path.name.endswith(".index.json")
        and path.name not in (CONFIG, README)
        and path.stat().st_size <= _SMALL_BYTES
    )


def _config_json(shape: ModelShape, base: str | Path | None, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json: that of the base model with the trained type of weights."""
    path = folder_of(base) / CONFIG if base else None
    if path is None or not path.is_file():
        return shape.to_hf() | {"torch_dtype": dtype}
    config = text_config(read_json(path, "copy the file again"))
    config |= {} if config.get("architectures") else {"architectures": [ARCHITECTURES[shape.family]]}
    named = [key for key in _DTYPE_KEYS if key in config] or ["torch_dtype"]
    if "num_nextn_predict_layers" in config:  # models here, and so exports, have no such layers
        config["num_nextn_predict_layers"] = 0
    return config | dict.fromkeys(named, dtype)


@contextmanager
def replaced_folder(folder: Path, names: Collection[str]) -> Iterator[Path]:
    """Yields an empty folder that replaces `folder` at the end, with everything written into it, or not at all.

    Args:
        names: names of files that an older export may hold.

    Raises:
        ConfigError: `folder` holds other files, which replacing it would delete, another process writes it, or it
            cannot be made.
    """
    folder = folder.absolute()
    _check_replaceable(folder, names)
    lock = folder.with_name(f".{folder.name}.lock")
    with ExitStack() as leaving:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(leaving.enter_context(open_own(lock, "a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another command writes {folder}; wait for its end, or name another folder") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):  # a file system may have no locks
                fix = "name a folder that can be made"
                raise ConfigError(f"cannot write {folder}: {error.strerror}; {fix}") from None
        leaving.callback(lock.unlink, missing_ok=True)
        scratch = leaving.enter_context(tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent))
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir()
        yield new
        for path in (*new.iterdir(), new):
            sync(path)  # a crash must not leave a renamed but empty export
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        sync(folder.parent)


def _generation_config(shape: ModelShape) -> dict[str, Any]:
    ids = {"bos_token_id": shape.bos_token_id, "eos_token_id": hf_eos(shape.stop_token_ids)}
    return {key: value for key, value in ids.items() if value is not None}


def _some_rows(path: Path, name: str, rows_N: np.ndarray, box: Box) -> Tensor:
    """Returns a part of the matrix whose rows are these rows of a tensor. Reads no other bytes."""
    chosen_N = rows_N[box.starts[0] : box.stops[0]]
    runs = np.split(chosen_N, np.flatnonzero(np.diff(chosen_N) != 1) + 1)
    with opened(path) as file:
        tensor = file.get_slice(name)
        parts = [tensor[int(run_N[0]) : int(run_N[-1]) + 1].flatten(1) for run_N in runs if len(run_N)]
    return torch.cat(parts)[:, box.starts[1] : box.stops[1]]


def _part(path: Path, name: str, box: Box) -> Tensor:
    """Returns a part of a tensor. Reads no other bytes, and closes the file, so mapped memory does not accumulate."""
    with opened(path) as file:
        tensor = file.get_slice(name)
        return tensor[box.within(Box.whole(tensor.get_shape()))]


def _check_replaceable(folder: Path, names: Collection[str]) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"cannot write a model to {folder}, which is a file; name another folder")
    others = sorted({path.name for path in folder.iterdir()} - set(names)) if folder.exists() else []
    if README in names and folder.exists() and (folder / README).is_file():
        others += [README] * (CARD_MARK not in (folder / README).read_text(encoding="utf-8", errors="replace"))
    if others:
        raise ConfigError(f"cannot replace {folder}, which also holds `{others[0]}`; name a new or empty folder")


def copy_tokenizer(source: str | Path, to: Path) -> None:
    """Copies the files of a tokenizer that exist."""
    for file in (folder_of(source) / name for name in TOKENIZER_FILES):
        if file.is_file():
            shutil.copyfile(file, to / file.name)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
