"""The joint of vLLM: a `Backend` of generators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from llamarl.config import ConfigError, RunConfig
from llamarl.config.hub import folder_of
from llamarl.parts.vllm.server import VllmFailed, VllmSettings, check_python

if TYPE_CHECKING:
    from llamarl.executors.generator import OpenedEngine

START_SHARE = 0.8
"""Share of an executor's start timeout that vLLM may use. The rest covers the process and the error message."""


def check(config: RunConfig) -> None:
    """Raises ConfigError if vLLM is not installed where the config says, or lacks a requested feature."""
    if config.has_episodes and config.rollout.agent is None:
        raise ConfigError(
            "rollout.environment with generator.backend = 'vllm': turns need an engine that continues a "
            "rollout of a group while others decode; use backend = 'native'"
        )
    check_python(config.generator.vllm.python)


def settings(config: RunConfig, logs: Path, number: int) -> VllmSettings:
    """Returns the options of one generator's vLLM, with a separate seed and log."""
    generator = config.generator
    assert generator.dtype in ("float32", "bfloat16"), "refused with the settings"
    return VllmSettings(
        python=generator.vllm.python,
        dtype=generator.dtype,
        device=generator.device,
        max_running=generator.max_running,
        prefill_tokens=generator.prefill_tokens,
        kv_bytes=generator.kv_cache_bytes,
        kv_dtype=generator.kv_dtype,
        threads=generator.threads,
        kv_on_update=generator.kv_on_update,
        seed=crc32(f"{config.seed}/{number}".encode()),
        start_timeout_s=START_SHARE * config.cluster.timeout_s,
        log_path=str(logs / f"generator-{number}.vllm.log"),
        arguments=tuple(generator.vllm.arguments),
    )


def open_engine(model_path: str, settings: VllmSettings, delta: bool) -> OpenedEngine:
    """
    Raises:
        ConfigError: vLLM does not start, or does not support this model.
    """
    from llamarl.executors.generator import (
        Adopter,  # imports torch, which the controller must not
        OpenedEngine,
    )
    from llamarl.parts.vllm.engine import VllmEngine

    try:
        engine = VllmEngine(folder_of(model_path), settings)
    except VllmFailed as error:
        raise ConfigError(f"generator.backend = 'vllm': {error}") from None
    return OpenedEngine(
        engine=engine,
        adopter=Adopter(engine.specs(), lambda tensors: None, delta=delta, subscribe=engine.subscribe),
        describe=lambda: f"all by vLLM, which {settings.python} runs",
        close=engine.close,
    )
