"""The package verifiers: its tasksets, and one episode of an environment. The only module that imports it. No torch."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from contextvars import ContextVar
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.env import RunSlot
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils.loaders import default_harness_id

from llamarl.config import ConfigError
from llamarl.parts.episodes.gateway.app import EPISODE_HEADER
from llamarl.parts.episodes.gateway.protocol import TOO_LONG
from llamarl.rewards._base import invalid
from llamarl.types import Outcome, RewardResult

__all__ = ["ChatHarness"]

HARNESS = "llamarl_chat"
"""Id by which verifiers imports this module as a plugin, whose class is in `__all__`."""
sys.modules[HARNESS] = sys.modules[__name__]
POLICY, KEY_VARIABLE = "policy", "LLAMARL_EPISODE_KEY"
_KEY = ContextVar[str]("key", default="")
"""Key of the episode whose harness runs."""
_OPEN = dict[str, "_ServedEnvironment"]()
"""Environments of this process, by their settings."""


class TasksetRow(NamedTuple):
    """What a row keeps of a task."""

    index: int
    key: str
    """Identity of the task's content."""
    prompt: str


def tasks_of(taskset: Mapping[str, Any], first: int, count: int) -> list[TasksetRow]:
    """Returns `count` tasks from `first` on. 0 means all. Raises ConfigError."""
    try:
        tasks = vf.load_taskset(vf.taskset_config_type(taskset["id"]).model_validate(taskset))
        if not count and tasks.INFINITE:
            raise ConfigError(f"the taskset {taskset['id']!r} has no end; set data.train.count")
        wanted = islice(tasks, first, first + count if count else None)
        return [TasksetRow(index, one.key, one.data.prompt_text) for index, one in enumerate(wanted, first)]
    except ConfigError:
        raise
    except Exception as error:  # the taskset's code may raise anything
        raise ConfigError(f"the taskset {taskset['id']!r} cannot be loaded: {type(error).__name__}: {error}") from error


async def episode(row: Mapping[str, Any], settings: Mapping[str, Any], base_url: str, api_key: str) -> RewardResult:
    """Runs one episode on a task, against the policy at `base_url`."""
    name = json.dumps([row["taskset"], settings], sort_keys=True)
    if (environment := _OPEN.get(name)) is None:
        environment = _OPEN[name] = _ServedEnvironment(row["taskset"], settings)
    return await environment.run(row, base_url, api_key)


class _ServedEnvironment:
    """An environment that serves until the process ends. It is entered and left by one asyncio task, as verifiers
    requires."""

    def __init__(self, taskset: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self._taskset, self._settings = taskset, settings
        self._tasks = list[vf.Task]()
        self._ready: asyncio.Future[vf.Env] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve())

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> RewardResult:
        env = await asyncio.shield(self._ready)
        task = self._tasks[row["index"]] if row["index"] < len(self._tasks) else await self._read(row["index"])
        if task is None or task.key != row["key"]:
            return invalid(f"verifiers: task {row['index']} is not the one that the data source read")
        role, is_in_process = policy_role(env)
        variable = KEY_VARIABLE if is_in_process else f"{KEY_VARIABLE}_{api_key}"
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
        token = _KEY.set(api_key)
        os.environ[variable] = "in a header" if is_in_process else api_key
        try:
            done = await env.run_slot(RunSlot(task), vf.ModelContext(model=POLICY, client=client))
        finally:
            _KEY.reset(token)
            if not is_in_process:
                del os.environ[variable]
        return result_of(done, role)

    async def _serve(self) -> None:
        try:
            env = await asyncio.to_thread(_loaded, self._taskset, self._settings)
            self._unread = iter(env.taskset)
            async with env.serving():
                self._ready.set_result(env)
                await asyncio.Event().wait()
        except Exception as error:  # the environment's code may raise anything; each episode fails with it
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _read(self, index: int) -> vf.Task | None:
        """Reads tasks up to an index. Returns None if there are fewer."""
        self._tasks += islice(self._unread, index + 1 - len(self._tasks))
        return self._tasks[index] if index < len(self._tasks) else None


def _loaded(taskset: Mapping[str, Any], settings: Mapping[str, Any]) -> vf.Env:
    """Returns an environment in which the policy plays one agent. Raises ConfigError."""
    env = vf.load_environment(environment_config(taskset, settings))
    policy_role(env)
    return env


def environment_config(taskset: Mapping[str, Any], settings: Mapping[str, Any]) -> vf.EnvConfig:
    """Returns the settings of an environment. Agents without a harness or a runtime get the chat loop in this process,
    and the local one."""
    raw = {**settings, "taskset": dict(taskset)}
    roles = agent_config_fields(vf.resolve_env_config(raw))
    own = {"runtime": {"type": "subprocess"}}
    if default_harness_id(taskset["id"]) == "bash":  # the default of tasksets without a harness
        own["harness"] = {"id": HARNESS}
    for name, role in roles.items():
        pinned = {"harness"} if role.harness is not None else set[str]()
        given = {key: value for key, value in own.items() if key not in pinned}
        raw[name] = given | dict(settings.get(name, {}))
    return vf.resolve_env_config(raw)


def policy_role(env: vf.Env) -> tuple[str, bool]:
    """Returns the agent that the policy plays, and whether it runs in this process. Raises ConfigError."""
    roles = {name: role for name, role in agent_config_fields(env.config).items() if role.client is None}
    if len(roles) != 1:
        raise ConfigError(
            f"rollout.agent.settings: the policy would play {len(roles)} agents ({', '.join(roles) or 'none'}) of this "
            "environment, and llamarl trains one; give the other agents a `client`"
        )
    ((name, role),) = roles.items()
    return name, role.harness is not None and role.harness.id == HARNESS


def result_of(done: vf.Episode, role: str) -> RewardResult:
    """Returns reward and metrics of an episode, or its first error."""
    errors = [*done.errors, *(one for trace in done.traces for one in trace.errors)]
    if not done.ok:
        said = f"{errors[0].type}: {errors[0].message}" if errors else "the episode failed without an error"
        return invalid(f"verifiers: {said}")
    traces = [one for one in done.traces if one.agent.name in (role, None, "")]
    if len(traces) != 1:
        return invalid(f"verifiers: the policy played {len(traces)} times in one episode, and llamarl trains one")
    (trace,) = traces
    parts = {name: one.value for name, one in trace.rewards.items() if one is not None}
    parts |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return RewardResult(outcome=Outcome.SCORE, value=float(trace.reward), parts=parts)


class ChatHarnessConfig(vf.HarnessConfig):
    """Settings of `ChatHarness`, those of every harness."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """The chat loop of verifiers' harness `null`, in this process instead of a program per episode."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, endpoint: str, secret: str,
        mcp_urls: dict[str, str], data: vf.TaskData,
    ) -> vf.ProgramResult:  # fmt: skip
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages += (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        )
        headers = {"Authorization": f"Bearer {secret}", EPISODE_HEADER: _KEY.get()}
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            schemas, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            tools = [one for one in schemas if one["function"]["name"] not in (self.config.disabled_tools or ())]
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while True:
                reply = await _http().post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if reply.status_code >= 400:
                    # As in `null`, a full context ends the episode, and the environment scores it as it is.
                    is_full = TOO_LONG in reply.text
                    return vf.ProgramResult(exit_code=0 if is_full else 1, stdout="", stderr=reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    said = await _called(call["function"], places, connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})


async def _called(function: Mapping[str, Any], places: dict[str, Any], connections: dict[str, Any]) -> Any:
    """Returns a tool's answer, or an error message for a malformed or unknown call. Raises if the tool's server
    fails."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error})"
    if not isinstance(arguments, dict):
        return "error: tool arguments must be a JSON object"
    if function["name"] not in places:
        return f"error: unknown tool {function['name']!r}"
    return await call_mcp(connections, places, function["name"], arguments)


@cache
def _http() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
