"""What the figures of `check.py` and `card.py` should reach, written before a GPU ran them.

Bars that a measurement has shown to be wrong are changed, with the reason (`CHANGED`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A figure of some row, or the quotient of those of two."""

    name: str
    figure: str
    """A key of the row, or "a-b": the difference of two."""
    of: Row
    """What the row says."""
    bar: float
    at_least: bool = True
    estimate: float | None = None
    """For one H200."""
    share: str = ""
    """Key of the row for the share of the roofline: of bandwidth, or of the peak of products."""
    by: Row | None = None
    """The figure of this row divides it."""


def _decode(dtype: str, graphs: bool) -> Row:
    return {"model": "8b", "dtype": dtype, "graphs": graphs, "batch": 64, "context": 1024}


BF16, NIXL = _decode("bfloat16", True), {"transport": "nixl", "model": "8b"}
SPEED: Row = {"figure": "step_s", "share": "bandwidth_share"}
BARS: Sequence[Bar] = (
    Bar(name="decode 8B bf16, 64 rows, 1k: bandwidth", figure="bandwidth_share", of=BF16, bar=0.78,
        estimate=0.82, share="bandwidth_share"),
    Bar(name="decode 8B bf16, 256 rows of 256: bandwidth", figure="bandwidth_share",
        of=BF16 | {"batch": 256, "context": 256}, bar=0.62, share="bandwidth_share"),
    Bar(name="decode 1B bf16, 64 rows: s a step", figure="step_s", of=BF16 | {"model": "1b"}, bar=0.0015,
        estimate=0.0014, at_least=False, share="bandwidth_share"),
    Bar(name="decode 8B: eager over graphs", of=_decode("bfloat16", False), by=BF16, bar=1.3, estimate=2.0, **SPEED),
    Bar(name="decode 8B: bf16 over fp8", of=BF16, by=_decode("fp8", True), bar=1.25, estimate=1.25, **SPEED),
    Bar(name="decode 8B: bf16 over fp8 with fp8 keys and values", of=BF16, bar=1.5, estimate=1.5,
        by=_decode("fp8", True) | {"kv_dtype": "fp8"}, **SPEED),
    Bar(name="decode 8B: bf16 over int8", of=BF16, by=_decode("int8", True), bar=1.2, **SPEED),
    Bar(name="training 8B, packed 4k: MFU", figure="mfu", of={"part": "train-8b", "model": "8b"}, bar=0.45,
        estimate=0.46, share="mfu"),
    Bar(name="training 1B, packed 4k: MFU", figure="mfu", of={"part": "train-1b", "model": "1b"}, bar=0.33,
        estimate=0.34, share="mfu"),
    Bar(name="log-probs by tiles over plain: time", figure="time_ratio", of={"logprobs": "8b"}, bar=1.15, estimate=1.1,
        at_least=False),
    Bar(name="optimizer step of 1B: share of bandwidth", figure="bandwidth_share", of={"optimizer": "1b"}, bar=0.8,
        estimate=0.85, share="bandwidth_share"),
    Bar(name="8B, all weights, a generator in turns: most GB", figure="peak_gb", of={"part": "turns-8b"}, bar=130,
        estimate=58, at_least=False),
    Bar(name="8B bf16 by nixl: fetched and proved, s", figure="fetch_s", of=NIXL, bar=0.06, estimate=0.02,
        at_least=False, share="fetch_share"),
    Bar(name="3B bf16 by nixl (on 80 GB): fetched and proved, s", figure="fetch_s", of=NIXL | {"model": "3b"}, bar=0.06,
        at_least=False, share="fetch_share"),
    Bar(name="3B bf16 by cuda_ipc between processes of one card: fetched and proved, s", figure="fetch_s",
        of={"transport": "cuda_ipc", "model": "3b"}, bar=0.02, estimate=0.01, at_least=False, share="fetch_share"),
    Bar(name="published to served, s", figure="served_s", of=NIXL, bar=0.06, estimate=0.045, at_least=False),
    Bar(name="longest step while weights come, s", figure="slowest_step_s-quiet_step_s", of=NIXL, bar=0.05,
        estimate=0.015, at_least=False),
    Bar(name="tests failed", figure="num_failed", of={"part": "tests"}, bar=0, at_least=False),
    Bar(name="trainer to generator, 1B bf16: mean |log-prob difference|", figure="mean",
        of={"probe": "mismatch", "model": "1b", "dtype": "bfloat16"}, bar=0.02, at_least=False),
    Bar(name="prefill of 1B, prompts of 2k: MFU", figure="mfu", share="mfu", bar=0.35,
        of={"probe": "prefill", "model": "1b", "prompt": 2048}),
    Bar(name="attention alone, 8k tokens, bf16: share of bandwidth", figure="bandwidth_share",
        of={"probe": "attention", "model": "8b", "context": 8192, "cached": "bfloat16", "stages": 3}, bar=0.8,
        estimate=0.85, share="bandwidth_share"),
    Bar(name="SmolLM2 on SVAMP, asynchronous: samples/s over synchronous", figure="samples_per_s",
        of={"run": "asynchronous"}, by={"run": "synchronous"}, bar=1.0),
    Bar(name="SmolLM2 on SVAMP, two processes on one card: samples/s over synchronous", figure="samples_per_s",
        of={"run": "processes"}, by={"run": "synchronous"}, bar=1.2),
    Bar(name="SmolLM2 on SVAMP: samples/s over TRL's on the same card", figure="samples_per_s",
        of={"run": "asynchronous"}, by={"run": "trl"}, bar=2.0),
    Bar(name="accuracy gained by the demo", figure="accuracy_after-accuracy_before", of={"part": "demo"}, bar=0.3),
)  # fmt: skip

CHANGED = {
    "decode 8B: bf16 over fp8": (1.4, "of a step of 10.85 ms fp8 weights halve the 5.48 ms of products: at best 1.34"),
    "training 8B, packed 4k: MFU": (0.40, "recomputing all layers cost 25 % of the products: it is selective now"),
    "training 1B, packed 4k: MFU": (
        0.35,
        "measured 0.26; without recomputation and with wide tiles 0.34 is calculated",
    ),
    "optimizer step of 1B: share of bandwidth": (0.6, "counted 28 bytes a weight; clipping and the step move 40"),
    "decode 8B bf16, 64 rows, 1k: bandwidth": (0.6, "reached: measured 0.73"),
}
"""Earlier bars of 2026-11-26, and why they are others now."""


def table(rows: Iterable[Row]) -> list[str]:
    """A line per bar: figure, bar, and share of the roofline."""
    rows = list(rows)
    return [_line(bar, rows) for bar in BARS]


def _line(bar: Bar, rows: Sequence[Row]) -> str:
    wanted = f"({'>=' if bar.at_least else '<='} {bar.bar:g}"
    wanted += ")" if bar.estimate is None else f", estimated {bar.estimate:g})"
    row, value = _found(bar.of, bar.figure, rows)
    if bar.by is not None and value is not None:
        _, divisor = _found(bar.by, bar.figure, rows)
        value = value / divisor if divisor else None
    if value is None or row is None:
        return f"not measured  {bar.name} {wanted}"
    reached = value >= bar.bar if bar.at_least else value <= bar.bar
    share = f"; {row[bar.share]:.0%} of the roofline" if row.get(bar.share) is not None else ""
    return f"{'reached' if reached else 'MISSED':<12}  {bar.name}: {value:.3g} {wanted}{share}"


def _found(of: Row, figure: str, rows: Sequence[Row]) -> tuple[Row | None, float | None]:
    """The last row that says so and has the figure."""
    first, _, second = figure.partition("-")
    for row in reversed(rows):
        if all(row.get(key) == value for key, value in of.items()) and row.get(first) is not None:
            return row, row[first] - (row[second] if second else 0.0)
    return None, None
