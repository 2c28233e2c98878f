"""docs/sft.md lists every key that `llamarl sft` reads, with its default."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from llamarl.config import RunConfig, SftConfig, load_sft
from llamarl.config.sft import ShapeConfig
from tests.architecture.repository import ROOT

PAGE = (ROOT / "docs" / "sft.md").read_text(encoding="utf-8")
FINE_TUNING, _, WARM_START = PAGE.partition("## Warm start from scratch")
IGNORED = {"trainer": {"loss", "advantage"}, "data": {"eval"}, "checkpoint": {"mirror"}}
"""Settings of sections that are listed key by key, which supervised training does not read."""
TABLES = {"shape", "trainer.parallelism", "trainer.lora", "data.train"}
"""Settings with keys or kinds of their own, whose default is explained in words."""


def listed(text: str) -> dict[str, str]:
    """Defaults by key, as the page writes them."""
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]*?) \| .+ \|$", text, re.MULTILINE)
    assert len(rows) == len(dict(rows))
    return dict(rows)


def fields(schema: type[BaseModel], before: str = "") -> dict[str, Any]:
    found = {f"{before}{name}": field for name, field in schema.model_fields.items()}
    return {name: field.default_factory() if field.default_factory else field.default for name, field in found.items()}


def written(value: Any) -> str:
    """Returns a default as the page writes it."""
    if value is None or value is PydanticUndefined:
        return "none" if value is None else "required"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "`{}`".format('"' + value.replace("\n", "\\n") + '"' if isinstance(value, str) else value)


def test_every_key_of_a_warm_start() -> None:
    known, told = fields(SftConfig) | fields(ShapeConfig, "shape."), listed(WARM_START)
    assert told.keys() == known.keys()
    for key in known.keys() - TABLES:
        assert told[key] == written(known[key]), key


def test_every_key_of_a_fine_tuning_run() -> None:
    told = listed(FINE_TUNING)
    for section in ("model", "data", "trainer", "checkpoint"):
        schema = RunConfig.model_fields[section].annotation
        assert isinstance(schema, type) and issubclass(schema, BaseModel)
        known = fields(schema, f"{section}.")
        ignored = {f"{section}.{name}" for name in IGNORED.get(section, ())}
        assert {key for key in told if key.startswith(f"{section}.")} == known.keys() - ignored
        for key in known.keys() - ignored - TABLES:
            assert told[key] == written(known[key]), key
    top = fields(RunConfig)
    for key in ("name", "output", "seed", "steps"):
        assert told[key] == written(top[key])
    assert told["rollout.prompts_per_step"] == written(top["rollout"].prompts_per_step)
    assert told["record.max_bytes"] == written(top["record"].max_bytes)


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
def test_the_run_file_loads(block: str, tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text(block)
    config = load_sft(tmp_path / "run.toml", [])
    assert isinstance(config, RunConfig)
    assert config.name == tomllib.loads(block)["name"]
