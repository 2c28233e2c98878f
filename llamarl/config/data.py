"""Sections `data` and `eval`: one or several sources of problems, and how their rows become prompts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, GetJsonSchemaHandler, Tag, model_validator

from llamarl.config.ref import Ref
from llamarl.config.roles import RewardParts
from llamarl.config.section import FilePath, Section

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

ONE, SEVERAL = "(one)", "(several)"
"""Tags of a `Ref` and of a list of sources. They are not part of an option's name."""
MIN_TEMPERATURE = 1e-3
"""Lowest positive temperature for sampling. Logits divided by less exceed float32. 0 is greedy."""
OF_EVAL = "eval/"
"""Prefix of `Prompt.source` for a set of held-out problems. Labels contain no slash."""
_LABEL = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
MAX_RATIO = 1e9
"""Largest ratio of two weights. A smaller share would be lost to rounding, or never drawn."""


def _day(value: object) -> object:
    """Returns the text of a date, which TOML also has without quotes."""
    if isinstance(value, str) and value and date.fromisoformat(value).isoformat() != value:
        raise ValueError(f"{value!r} is not a day as in 2026-07-26")
    return value.isoformat() if type(value) is date else value


def _parts(value: Any) -> Any:
    """Returns `{parts = ...}` for `"gsm8k"`, `{name = "judge"}` and `["gsm8k", "format"]`."""
    if isinstance(value, list):
        return {"parts": value}
    is_part = isinstance(value, str | Ref) or (isinstance(value, dict) and "parts" not in value)
    return {"parts": [value]} if is_part else value


AGENTS = frozenset(("verifiers",))
"""Names that users take for environments, and that are agents."""


def with_agent(values: Any) -> Any:
    """Returns settings in which an `environment` that is an agent is the `agent`. Raises ValueError."""
    if not isinstance(values, dict) or not isinstance(given := values.get("environment"), str | dict):
        return values
    given = {"name": given} if isinstance(given, str) else given
    if given.get("name") not in AGENTS:
        return values
    if values.get("agent"):
        name = given["name"]
        raise ValueError(f"rollout.environment = {name!r} is an agent, and rollout.agent is set, too; leave one out")
    return {name: value for name, value in values.items() if name != "environment"} | {"agent": given}


def with_tools(values: Any, section: str = "") -> Any:
    """Returns settings in which `tools` are replaced by the environment that runs them. Raises ValueError."""
    if not isinstance(values, dict) or not values.get("tools"):
        return values
    environment = Ref.model_validate(values.get("environment") or "tools")
    if environment.name != "tools":
        raise ValueError(
            f"{section}tools with {section}environment = {environment.name!r}: tools are an environment themselves; "
            "leave one of them out"
        )
    return values | {"environment": {"name": "tools", **environment.options, "functions": values["tools"]}}


def _sampled(value: float | None) -> float | None:
    if value is not None and 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"temperature = {value}: give 0 (greedy) or at least {MIN_TEMPERATURE}")
    return value


class FilterConfig(Section):
    """Selects prompts by the pass rate of a model."""

    path: FilePath
    """Pass rates written by `llamarl eval --rates FILE`."""
    min: float = Field(default=0.05, ge=0, le=1)
    """Lowest pass rate to keep. A prompt that is never solved teaches nothing."""
    max: float = Field(default=0.95, ge=0, le=1)
    """Highest pass rate to keep. A prompt that is always solved teaches nothing."""

    @model_validator(mode="after")
    def _order(self) -> FilterConfig:
        if self.min > self.max:
            raise ValueError(f"min = {self.min:g} is above max = {self.max:g}, which keeps nothing; swap them")
        return self


class SourceConfig(Section):
    """One source of several. Settings that it leaves out are the run's.

    An entry may be flat. Keys that are not settings below are then the source's name and options, as in `{name = "hub",
    path = "openai/gsm8k", template = "{question}"}`.
    """

    source: Ref
    """Prompt source, for example `{name = "jsonl", path = "train.jsonl"}`."""
    label: str = Field(default="", pattern=_LABEL)
    """Name of the source in metrics, files and plots. Default: the name of its data set, file or kind."""
    template: str | None = None
    """`data.template` of this source."""
    system: str | None = None
    """`data.system` of this source."""
    examples: list[dict[str, str]] | None = None
    """`data.examples` of this source."""
    template_arguments: dict[str, Any] | None = None
    """`data.template_arguments` of this source."""
    solution: str | None = None
    """`data.solution` of this source."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """`data.max_prompt_tokens` of this source."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """`rollout.max_new_tokens` of this source, shorter or longer."""
    reward: Annotated[RewardParts | None, BeforeValidator(_parts, json_schema_input_type=Any)] = None
    """`reward.parts` of this source: a name, a part with options, a list, or `{parts = [...], weights = [...]}`."""
    environment: Ref | None = None
    """`rollout.environment` of this source."""
    tools: list[str] = Field(default_factory=list)
    """`rollout.tools` of this source."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """An entry may be flat, or a plain name."""
        table = handler.resolve_ref_schema(handler(core)) | {"additionalProperties": True}
        table["required"] = [name for name in table.get("required", ()) if name != "source"]
        return {"anyOf": [{"type": "string"}, table]}

    @model_validator(mode="before")
    @classmethod
    def _from_flat(cls, value: Any) -> Any:
        if isinstance(value, str | Ref):
            value = {"source": value}
        if not isinstance(value, Mapping):
            return value
        own = dict(value)
        if "source" in own and "name" in own:
            raise ValueError(
                "`name` next to `source`: an entry is flat, or has the name and options of its source in `source`"
            )
        if "source" not in own:
            options = {name: own.pop(name) for name in value if name not in cls.model_fields}
            if "name" not in options:
                raise ValueError(f"a source needs its `name`, such as 'hub' or 'jsonl'; this has {', '.join(value)}")
            own["source"] = options
        if not isinstance(own["source"], str | Ref | Mapping):  # validation refuses it
            return own
        return with_tools({"label": _label(own["source"])} | own)


class TrainSource(SourceConfig):
    """One training source of a mixture."""

    weight: float = Field(default=1.0, gt=0, le=1e9)
    """Share of the prompts from this source, relative to the other weights. The size of the source does not matter."""
    filter: FilterConfig | None = None
    """`data.filter` of this source."""
    teacher: FilePath = ""
    """`reference.path` of this source: the model that teaches its prompts."""


MAX_SAMPLES = 4096
"""Most responses per held-out prompt. All are in memory until the last one is scored."""


class EvalConfig(Section):
    every_steps: int = Field(default=0, ge=0)
    """Evaluate every N steps, in parallel with training. 0 means only before and after training."""
    max_prompts: int = Field(default=256, ge=1)
    """Number of held-out prompts, the first of the source."""
    samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Responses per prompt. With more than one, pass@k is reported as well."""
    temperature: Annotated[float, AfterValidator(_sampled)] = Field(default=0.0, ge=0, le=100)
    """0 is greedy."""


class EvalSet(SourceConfig):
    """One of several sets of held-out problems, with its own curve. `label` is its name."""

    every_steps: int | None = Field(default=None, ge=0)
    """`eval.every_steps` of this set."""
    max_prompts: int | None = Field(default=None, ge=1)
    """`eval.max_prompts` of this set."""
    samples: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """`eval.samples` of this set."""
    temperature: Annotated[float | None, AfterValidator(_sampled)] = Field(default=None, ge=0, le=100)
    """`eval.temperature` of this set. Default: the run's; if that is 0, several samples are drawn at 1."""

    @property
    def key(self) -> str:
        """`Prompt.source` of its prompts. It differs from the labels of all training sources."""
        return OF_EVAL + self.label

    def resolved(self, run: EvalConfig, option: str) -> EvalConfig:
        """Returns section `eval` of a run with only this set. Raises ValueError if all samples would be equal."""
        own = {name: one for name in EvalConfig.model_fields if (one := getattr(self, name)) is not None}
        samples = self.samples or run.samples
        if samples > 1 and self.temperature == 0:
            raise ValueError(
                f"{option}.temperature = 0 with samples = {samples}: greedy responses are equal; leave it out "
                "to sample at 1, or take one sample"
            )
        return run.model_copy(update={"temperature": run.temperature or float(samples > 1)} | own)


S = TypeVar("S", bound=SourceConfig)


def _which(value: Any) -> str:
    return SEVERAL if isinstance(value, list | tuple) else ONE


Sources = Annotated[
    Annotated[Ref, Tag(ONE)] | Annotated[list[S], Field(min_length=1, max_length=1 << 10), Tag(SEVERAL)],
    Discriminator(_which),
]
"""One source, or a list of sources with their own settings."""


class DataConfig(Section):
    train: Sources[TrainSource]
    """Prompt source, for example `{name = "jsonl", path = "train.jsonl"}`, or a list of sources to mix."""
    eval: Sources[EvalSet] | None = None
    """Held-out prompt source, or a list of named sets. Without it there is no evaluation."""
    filter: FilterConfig | None = None
    """Keeps prompts of `train` by measured pass rate: `{path = "rates.jsonl", min = 0.05, max = 0.95}`."""
    template: str = "auto"
    """Prompt text with `{field}` placeholders, or `chat` for the tokenizer's chat template. `auto` means `chat` if
    there is a chat template, else `{question}` and a line break."""
    system: str = ""
    """Message of the role `system` at the start of each conversation of a chat template."""
    examples: list[dict[str, str]] = Field(default_factory=list)
    """Solved problems in each prompt before its own: `[{question = "1+1?", answer = "2"}]`."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, for example `{enable_thinking = false}`."""
    date: Annotated[str, BeforeValidator(_day)] = ""
    """Today's date for chat templates, such as `2026-07-26`. Empty means the day on which the run starts."""
    solution: str = "solution"
    """Field with the response that `llamarl sft` trains on; use `answer` if it contains the full solution. In rows that
    are conversations, it trains on the assistant's messages."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["skip", "refuse"] = "skip"
    """Skip and count prompts over `max_prompt_tokens`, or refuse to start."""

    @model_validator(mode="after")
    def _labels(self) -> DataConfig:
        check_labels(self.sources, "data.train")
        check_labels(self.eval_sets, "data.eval")
        weights = [one.weight for one in self.sources]
        if weights and max(weights) > MAX_RATIO * min(weights):
            raise ValueError(
                f"data.train: weights {min(weights):g} and {max(weights):g} are too far apart, so the first source is "
                f"never drawn; give weights within a factor of {MAX_RATIO:g}"
            )
        return self

    @property
    def sources(self) -> Sequence[TrainSource]:
        """The sources of a mixture. Empty if `train` is a single source."""
        return self.train if isinstance(self.train, list) else ()

    @property
    def eval_sets(self) -> Sequence[EvalSet]:
        """The sets of held-out problems. Empty if `eval` is a single source."""
        return self.eval if isinstance(self.eval, list) else ()

    @property
    def by_key(self) -> dict[str, SourceConfig]:
        """Sources of a mixture and sets of held-out problems, by `Prompt.source`."""
        sources: dict[str, SourceConfig] = {one.label: one for one in self.sources}
        return sources | {one.key: one for one in self.eval_sets}

    def of(self, source: SourceConfig) -> DataConfig:
        """Returns the settings with `source` as the only source."""
        own = {
            name: value
            for name in (
                "template",
                "system",
                "examples",
                "template_arguments",
                "solution",
                "max_prompt_tokens",
                "filter",
            )
            if (value := getattr(source, name, None)) is not None
        }
        if own.get("template", self.template) not in ("auto", "chat"):
            own["date"] = ""  # only chat templates of other sources contain it
        return self.model_copy(update={"eval" if isinstance(source, EvalSet) else "train": source.source} | own)


def check_labels(sources: Sequence[SourceConfig], option: str) -> None:
    """Raises ValueError if two sources have the same label."""
    label, times = Counter(source.label for source in sources).most_common(1)[0] if sources else ("", 0)
    if times > 1:
        raise ValueError(f"{option}: {times} sources have the label {label!r}; give each a different `label`")


def _label(source: Any) -> str:
    """Returns the default name of a source: the name of its data set, else of its first file, else its kind."""
    options = {"name": source} if isinstance(source, str) else dict(source) if isinstance(source, dict | Ref) else {}
    path = options.get("path")
    path = path[0] if isinstance(path, list | tuple) and path else path
    name = str(options.get("name", ""))
    if isinstance(path, str) and path:
        name = PurePosixPath(path).name.partition("@")[0]
        name = name if options.get("name") == "hub" else name.partition(".")[0] or name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name.rpartition(":")[2]).lstrip("._-").rstrip("-") or "source"
