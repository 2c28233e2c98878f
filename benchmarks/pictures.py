"""The pictures of docs/reading_a_run.md: real runs of the demo, good and bad ones, as their page shows them.

    python benchmarks/pictures.py [--runs runs/pictures] [--pictures docs/pictures]

Runs that are there already are not made again. Needs chromium, and the extra `dev`; about ten minutes on two cores. The
curves of these runs are kept as well, for tests of what the page says of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from llamarl.parts.page.cli import report

ROOT = Path(__file__).parents[1]
BRIEF = "{name = 'examples.own_reward.reward:Brevity', limit = 120}"
OLD = ["--trainer.learning_rate", "4e-4", "--trainer.loss", "{name = 'reinforce'}", "--eval.every_steps", "10"]
RUNS = {
    "good": ["--steps", "60", "--eval.every_steps", "20"],
    "too_fast": ["--steps", "40", "--eval.every_steps", "20", "--trainer.learning_rate", "6e-3",
                 "--trainer.on_nonfinite", "skip"],
    "hacked": ["--steps", "60", "--eval.every_steps", "20", "--reward.parts", f"['gsm8k', {BRIEF}]",
               "--reward.weights", "[0.05, 1.0]"],
    "brief": ["--steps", "50", "--eval.every_steps", "25", "--reward.parts", f"[{BRIEF}]"],
    "stale": ["--steps", "50", "--rollout.max_staleness", "12", *OLD],
    "fresh": ["--steps", "50", "--rollout.max_staleness", "1", *OLD],
    "generator_bound": ["--steps", "24", "--eval.every_steps", "12", "--generator.max_running", "8"],
}  # fmt: skip
PICTURES = {
    "good": (["good"], "top"),
    "too_fast": (["too_fast"], "top"),
    "hacked": (["hacked"], "top"),
    "stale": (["stale", "fresh"], "top"),
    "generator_bound": (["generator_bound"], "timeline"),
}
"""Which runs, and which part of their page."""
CURVES = ("reward_mean", "solve_rate", "response_tokens_mean", "truncated_share", "kl_to_behavior")


def make(name: str, folder: Path) -> None:
    """One run."""
    command = [sys.executable, "-m", "llamarl", "train", "configs/demo.toml", "--name", name, "--output", str(folder)]
    settings = ["--overwrite", "--screen.kind", "lines", *RUNS[name]]
    subprocess.run([*command, *settings], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def curves(folder: Path) -> str:
    """What tests need of a run, as JSON."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    evals = [[row["step"], row["accuracy"], row["num_prompts"]] for row in rows if row["kind"] == "eval"]
    steps = [row for row in rows if row["kind"] == "step"]
    columns = {name: [float(f"{row[name]:.3g}") for row in steps] for name in CURVES}
    lines = [
        f' "{name}": {json.dumps(value, separators=(",", ":"))}' for name, value in ({"evals": evals} | columns).items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}"


def draw(runs: Path, pictures: Path) -> None:
    """All pictures, as wide as a document shows them sharply."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for name, (of_runs, part) in PICTURES.items():
            html = runs / f"{name}.html"
            report.main([*(str(runs / one) for one in of_runs), "--output", str(html)])
            page.goto(html.absolute().as_uri())
            page.wait_for_selector("#list tbody tr")
            page.wait_for_timeout(500)
            shot = page if part == "top" else page.locator(f"#{part}")
            shot.screenshot(path=pictures / f"{name}.jpg", type="jpeg", quality=75)
        browser.close()


def main() -> None:
    """Makes what is missing, then draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/pictures"), help="folder of the runs")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "pictures", help="where pictures go")
    options = parser.parse_args()
    for name in RUNS:
        if not (options.runs / name / "summary.json").exists():
            make(name, options.runs)
    draw(options.runs, options.pictures)
    kept = ",\n".join(f'"{name}": {curves(options.runs / name)}' for name in RUNS)
    (ROOT / "tests" / "parts" / "page" / "curves.json").write_text("{\n" + kept + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
