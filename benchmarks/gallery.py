"""Curves of the gallery's examples: runs those that have no other measurement, and draws all pictures.

    python benchmarks/gallery.py [--only own_reward judge code] [--runs FOLDER]
    python benchmarks/gallery.py --picture

Start `python examples/judge/stand_in.py` before the run `judge`. `--runs` reads finished runs of the examples in place
of making them. `--picture` draws from the results that exist.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _record import RESULTS, write_result

EXAMPLES = Path(__file__).parents[1] / "examples"
PICTURES = EXAMPLES.parent / "docs" / "pictures"
RUNS = ("own_reward", "judge", "code")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 280, 56, 16, 40, 40
COLOR = "#3b7dd8"
TITLES = {
    "own_reward": "Held-out accuracy",
    "judge": "Held-out share of responses with 10 points",
    "code": "Held-out share of programs that pass all tests",
    "tools": "Share of sampled responses that are right, mean of 3 seeds",
    "sft_then_rl": "Share of sampled responses that are right, mean of 20 seeds",
}
LEARNED = {"tools": ("learning-2026-11-26", "calculator"), "sft_then_rl": ("learning-2026-11-25", "demo")}
"""Examples whose task another benchmark measured: its file, and the task there."""
STEPS_PER_POINT = {"tools": 5, "sft_then_rl": 5}


def train(name: str, output: Path) -> None:
    """Runs an example."""
    toml = EXAMPLES / name / "run.toml"
    if (script := EXAMPLES / name / "make_data.py").exists():
        subprocess.run([sys.executable, str(script)], check=True)
    subprocess.run(
        [sys.executable, "-m", "llamarl", "train", str(toml), "--overwrite", "--output", str(output)], check=True
    )


def curve_of(run: Path) -> dict[str, Any]:
    """Returns what the evaluations of a run measured, by step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evals = [row for row in rows if row["kind"] == "eval"]
    return {
        "steps": [row["step"] for row in evals],
        "accuracy": [row["accuracy"] for row in evals],
        "length": [row["mean_response_tokens"] for row in evals],
    }


def curves() -> dict[str, list[tuple[float, float]]]:
    """Returns the points (step, share) of each example's picture."""
    newest = max(RESULTS.glob("gallery-*.json"))
    found = dict[str, list[tuple[float, float]]]()
    for name, run in json.loads(newest.read_text(encoding="utf-8"))["runs"].items():
        found[name] = list(zip(run["steps"], run["accuracy"], strict=True))
    for name, (file, task) in LEARNED.items():
        runs = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["runs"]
        rates = [run["solve_rate"] for run in runs if (run["task"], run["way"]) == (task, "S=1")]
        means = [statistics.fmean(values) for values in zip(*rates, strict=True)]
        each = STEPS_PER_POINT[name]
        found[name] = [(each * (i + 0.5), value) for i, value in enumerate(means)]
    return found


def draw(title: str, points: list[tuple[float, float]]) -> str:
    """Returns a picture as SVG."""
    last = -(-max(step for step, _ in points) // 10) * 10

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value, 1)

    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="600">{title}</text>',
    ]
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        (x, y), (end, _) = place(0, share), place(last, share)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end" fill="#555">{share:.0%}</text>')
        middle = place(last * share, 0)[0]
        parts.append(f'<text x="{middle}" y="{HEIGHT - 20}" text-anchor="middle" fill="#555">{last * share:.0f}</text>')
    corners = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
    parts.append(f'<polyline points="{corners}" fill="none" stroke="{COLOR}" stroke-width="2"/>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end" fill="#555">optimizer steps</text></svg>'
    )
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=RUNS, default=RUNS)
    parser.add_argument("--runs", type=Path, help="folder of finished runs")
    parser.add_argument("--picture", action="store_true", help="draw only")
    options = parser.parse_args()
    if not options.picture:
        folder = options.runs or Path("runs/gallery")
        for name in options.only if options.runs is None else ():
            train(name, folder)
        runs = {name: curve_of(folder / name) for name in options.only}
        notes = [
            "accuracy: greedy, on 256 held-out problems, by step; length: tokens of a response, their mean.",
            "2026-11-28: one process (cluster.kind = 'inline'), on a machine that was busy with other work.",
        ]
        print(write_result("gallery", {"seed": 0}, {"runs": runs}, notes))
    for name, points in curves().items():
        (PICTURES / f"example_{name}.svg").write_text(draw(TITLES[name], points), encoding="utf-8")


if __name__ == "__main__":
    main()
