"""A taskset of the package verifiers: sums, and a tool that adds. Tasks do what their number says."""

from __future__ import annotations

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class AdderConfig(vf.ToolsetConfig):
    pass


class Adder(vf.Toolset[AdderConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


class SumConfig(vf.TaskConfig):
    has_tool: bool = False


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        return [Adder(AdderConfig())] if config.has_tool else []

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.idx == 3:
            raise RuntimeError("task 3 is broken")

    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def num_turns_seen(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()
    count: int = 8


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> list[Sum]:
        return [
            Sum(SumData(idx=n, prompt=f"{n} + {n}", system_prompt="Add.", answer=str(2 * n)), self.config.task)
            for n in range(self.config.count)
        ]


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
