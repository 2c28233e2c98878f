"""Checks names, shapes and types of a checkpoint's tensors against the configuration, from the headers of the files or
from their index. Reads no weight. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from llamarl.config import ConfigError
from llamarl.config.hub import folder_of, open_hub, why_offline
from llamarl.models.file_parts import FileLayout
from llamarl.models.folder import CONFIG, WEIGHTS_INDEX, load_shape, opened, read_model_file, weight_files
from llamarl.models.shape import ModelShape
from llamarl.models.sizes import num_scalars
from llamarl.observability.spans import stage
from llamarl.sharding.tensor_parallel import is_expert

EMBEDDING, HEAD, LAST_NORM, SCORE = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "score.weight"
_TYPES = ("F64", "F32", "F16", "BF16")
"""Types of weights, as named by safetensors."""
_LEAST_BYTES = 2
"""Bytes of the smallest of these types."""
_FIX = f"copy the whole checkpoint again, or correct {CONFIG}"
Shapes = Mapping[str, Sequence[int]]


class Expected:
    """Tensors that the files of a model must have."""

    def __init__(
        self, folder: Path, shape: ModelShape, expected: Shapes, optional: Sequence[str] = (), is_tied: bool = False
    ) -> None:
        """
        Args:
            shape: shape of the model, whose family decides the names of experts in files.
            expected: shapes by name.
            optional: names that may be missing.
            is_tied: whether the embeddings are the model's output head.
        """
        self._folder, self._shape, self._optional, self._is_tied = folder, shape, optional, is_tied
        self._shapes = expected
        self.layout = FileLayout(shape)
        self._names = {name: self.layout.names(name, sizes) for name, sizes in expected.items()}
        self._expected = dict[str, tuple[int, ...]]()
        self._of_all = dict[str, str]()
        """Name of the tensor with all experts by the name of an expert's tensor, in files that may have either."""
        self._all_experts = dict[str, tuple[int, ...]]()
        """Shapes of such tensors by name."""
        for name, sizes in expected.items():
            joined, of_all = self.layout.joined(name), self.layout.all_experts(name, sizes) if is_expert(name) else None
            in_files = joined.sizes if joined else tuple(sizes[1:] if is_expert(name) else sizes)
            self._expected |= dict.fromkeys(self._names[name], in_files)
            if of_all is not None:
                self._all_experts[of_all[0]] = of_all[2]
                self._of_all |= dict.fromkeys(self._names[name], of_all[0])

    def is_other_head(self, name: str) -> bool:
        """Returns whether this is the output head of a checkpoint whose model has no separate one."""
        return name == HEAD and name not in self._expected

    def check_name(self, name: str) -> bool:
        """Returns False if the tensor is ignored. Raises ConfigError: the model has no such tensor."""
        if self.layout.is_left_out(name) or self.is_other_head(name):
            return False
        if name not in self._expected and name not in self._all_experts:
            raise ConfigError(
                f"{self._folder}: unknown tensor `{name}`; the weights and {CONFIG} are of different models"
            )
        return True

    def check_missing(self, present: Collection[str]) -> None:
        """Raises ConfigError: tensors are missing."""
        missing = [
            name
            for name in self._expected
            if name not in present and self._of_all.get(name) not in present and name not in self._optional
        ]
        if missing:
            raise ConfigError(f"{self._folder}: {len(missing)} tensors are missing, first `{missing[0]}`; {_FIX}")

    def check_tied_head(self, is_alike: bool) -> None:
        """Raises ConfigError: a tied checkpoint has a head that differs from the embeddings, so one of the two would be
        ignored."""
        if self._is_tied and not is_alike:
            raise ConfigError(
                f"{self._folder}: `{HEAD}` differs from `{EMBEDDING}`, but {CONFIG} says "
                f"`tie_word_embeddings` = true; set it to false or remove `{HEAD}`"
            )

    def check_tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """Raises ConfigError: a tensor of the model has the wrong type or shape."""
        if dtype not in _TYPES:
            raise ConfigError(
                f"{self._folder}: `{name}` has the type {dtype}, and its values mean nothing without their scales; "
                f"use a checkpoint in {', '.join(_TYPES)}"
            )
        if shape != (expected := self._expected.get(name) or self._all_experts[name]):
            raise ConfigError(
                f"{self._folder}: `{name}` has shape {shape}, but {CONFIG} says {expected}; "
                "the weights and the config are of different models"
            )


class Headers(Expected):
    """The headers of a checkpoint's files, all checked."""

    def __init__(
        self, folder: Path, shape: ModelShape, expected: Shapes, optional: Sequence[str] = (), is_tied: bool = False
    ) -> None:
        """
        Raises:
            ConfigError: a file is missing or damaged, or a tensor is missing, unknown, repeated, or of the wrong shape
                or type.
        """
        super().__init__(folder, shape, expected, optional, is_tied)
        self._files = dict[str, Path]()
        self._stored = dict[str, str]()
        """Name in the files by the name without a prefix."""
        self.other_head: Path | None = None
        """File with the output head of the checkpoint, if the model has no separate one."""
        for path in weight_files(folder):
            with opened(path, "np") as file:
                for stored in file.keys():  # noqa: SIM118 - the file is no mapping
                    name, tensor = self.layout.plain(stored), file.get_slice(stored)
                    sizes = tuple(tensor.get_shape())
                    if self.is_other_head(name):
                        self.other_head = path
                        self.check_tied_head(sizes == tuple(expected[EMBEDDING]))
                    elif self.check_name(name):
                        self.check_tensor(name, sizes, tensor.get_dtype())
                        if name in self._files:
                            both = f"{self._files[name].name} and {path.name}"
                            raise ConfigError(f"{folder}: `{name}` is in {both}; {_FIX}")
                        self._files[name], self._stored[name] = path, stored
        self.check_missing(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check_score(self) -> None:
        """Raises ConfigError: there is no head that scores."""
        if SCORE not in self:
            what = "a language model" if self.other_head is not None else "a model"
            raise ConfigError(f"{self._folder} holds {what} without `{SCORE}`; name a sequence classification model")


def _expected_weights(role: str, shape: ModelShape) -> tuple[Shapes, tuple[str, ...], bool]:
    """Returns shapes by name of a model in this role, names that may be missing, and whether its head is tied."""
    weights = shape.weights()
    if role not in ("critic", "reward-model"):
        return weights, (), shape.tie_embeddings
    scalar = {name: sizes for name, sizes in weights.items() if name != HEAD}
    return scalar | {SCORE: (1, shape.hidden_size)}, (SCORE,), False


@stage("checking the weights' files")
def check_weights(folder: str | Path, role: str = "policy") -> None:
    """Checks names, shapes and types of all weights against the configuration.

    Args:
        role: name of the executor that loads them. Critics and reward models have another head.

    Raises:
        ConfigError: see `Headers`.
    """
    shape, path = load_shape(folder), folder_of(folder)
    expected, optional, is_tied = _expected_weights(role, shape)
    headers = Headers(path, shape, expected, optional, is_tied)
    if role == "reward-model":
        headers.check_score()


def check_listed_weights(name: str, files: Mapping[str, int], role: str = "policy") -> None:
    """Checks weights that were not fetched as far as possible: all files are listed, the index names the tensors of the
    configuration, and the files are large enough.

    Args:
        name: `owner/name@commit`, whose small files are on this machine.
        files: bytes of all files of the repository, by path.
        role: as in `check_weights`.

    Raises:
        ConfigError: a file or a tensor is missing, or a tensor is unknown.
    """
    if why_offline() and not any(path.endswith(".safetensors") for path in files):
        return  # the cache of another program may list only its files
    try:
        chosen = open_hub().model_files(files)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    shape, folder = load_shape(name), folder_of(name)
    shapes, optional, is_tied = _expected_weights(role, shape)
    expected = Expected(folder, shape, shapes, optional, is_tied)
    if WEIGHTS_INDEX in chosen and (folder / WEIGHTS_INDEX).is_file():
        places = read_model_file(folder, WEIGHTS_INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ConfigError(f"{folder / WEIGHTS_INDEX} has no `weight_map`; fetch the file again")
        named = (expected.layout.plain(tensor) for tensor in places)
        expected.check_missing({tensor for tensor in named if expected.check_name(tensor)})
        if missing := sorted(set(places.values()) - files.keys()):
            raise ConfigError(f"{name} has no {missing[0]}, which {WEIGHTS_INDEX} names; name another revision")
    needed = _LEAST_BYTES * num_scalars({name: tuple(shapes[name]) for name in shapes if name not in optional})
    actual = sum(files[path] for path in chosen if path.endswith(".safetensors"))
    if 0 < actual < needed:  # 0 means unknown
        raise ConfigError(
            f"{name}: its weights have {actual:,} bytes, but {CONFIG} needs {needed:,} at least; name another revision"
        )
