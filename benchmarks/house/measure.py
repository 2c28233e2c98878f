"""How easy the code is to find one's way in: sizes, borders, constructors, prose, and what a demo passes through.

    python benchmarks/house/measure.py [--tree FOLDER] [--base FOLDER] [--runs 3] [--no-demo] [--folder FOLDER]

Counts any checkout of this repository in the same way.

- Code lines are without blank lines, comments and docstrings. Only Python counts.
- An import counts once for each importer and imported module, also inside functions and for types alone.
- Constructors are listed if their written `__init__` takes more than seven arguments. Generated ones do not count.
- Files and record types that a demo of four steps enters, executors in threads (`demo.py` says how that is counted):
  what every one of `--runs` runs enters, as timers differ from run to run. The base model is made once, in a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from _record import write_result
from source import Source, crossing, long_constructors, prose, sizes

HERE = Path(__file__).parent
STEPS, DEADLINE_S = 4, 900.0
Row = tuple[str, str, str]
"""A measure, its value now, and the most it should be."""


def text_measures(tree: Path) -> tuple[list[Row], dict[str, Any]]:
    """Counts the text, and runs nothing."""
    source = Source(tree)
    rooms, edges, constructors, words = sizes(source), crossing(source), long_constructors(source), prose(source)
    core = {name: row for name, row in rooms.items() if not name.startswith("parts/")}
    totals = {
        "core_files": sum(row["files"] for row in core.values()),
        "core_code_lines": sum(row["code_lines"] for row in core.values()),
        "part_code_lines": sum(row["code_lines"] for name, row in rooms.items() if name not in core),
    }
    rows = [(name, f"{row['code_lines']:,}", "-") for name, row in rooms.items()]
    rows += [
        ("code lines of the core", f"{totals['core_code_lines']:,}", "-"),
        ("code lines of parts", f"{totals['part_code_lines']:,}", "-"),
        ("files of the core", str(totals["core_files"]), "190"),
        ("imports from the core into parts", str(len(edges["core_to_part"])), "0"),
        ("imports between parts", str(len(edges["part_to_part"])), "0"),
        ("constructors with more than seven arguments", str(len(constructors)), "0"),
        ("pages of the docs", str(words["docs_pages"]), "26"),
        ("words of the docs", f"{words['docs_words']:,}", "32,000"),
        ("lines of the README", str(words["readme_lines"]), "110"),
        ("constructions of the word list", str(words["dialect"]), "0"),
    ]
    return rows, totals | words | {"rooms": rooms, "edges": edges, "long_constructors": constructors}


def demo_measures(tree: Path, base: Path, runs: int) -> tuple[list[Row], dict[str, Any]]:
    """Of a demo that is run so many times."""
    command = [sys.executable, str(HERE / "demo.py"), str(tree), str(base), str(STEPS)]
    found = list[dict[str, Any]]()
    for _ in range(runs):
        done = subprocess.run(
            command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, text=True, timeout=DEADLINE_S,
            capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"demo {len(found)} of {runs} done", file=sys.stderr, flush=True)
    figures = dict[str, Any]()
    for name in found[0]:
        files, records = ([set(one[name][kind]) for one in found] for kind in ("files", "records"))
        figures[name] = {
            "num_files": len(set.intersection(*files)),
            "num_records": len(set.intersection(*records)),
            "files": by_folder(sorted(set.intersection(*files))),
            "files_by_chance": sorted(set.union(*files) - set.intersection(*files)),
            "records": sorted(set.intersection(*records)),
        }
    steps, way, whole = (figures[name] for name in ("steps", "way", "command"))
    return [
        ("files that the steps of the demo enter", str(steps["num_files"]), "80"),
        ("record types that they build", str(steps["num_records"]), "-"),
        ("files on the way of a prompt to a gradient", str(way["num_files"]), "64"),
        ("files that the whole command enters", str(whole["num_files"]), "-"),
        ("record types that it builds", str(whole["num_records"]), "-"),
    ], {"demo": figures}


def by_folder(names: Sequence[str]) -> dict[str, str]:
    found = defaultdict[str, list[str]](list)
    for name in names:
        folder, _, file = name.rpartition("/")
        found[folder or "."].append(file.removesuffix(".py"))
    return {folder: " ".join(files) for folder, files in found.items()}


def commit_of(tree: Path) -> str:
    """The last that changed the package, with a `+` where its files differ from that."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tree), *arguments, "--", "llamarl"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return (git("log", "-1", "--format=%h") or "unknown") + ("+" if git("status", "--porcelain") else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="checkout to count; default: this one")
    parser.add_argument("--base", type=Path, help="the demo's base model; default: runs/base/demo of the checkout")
    parser.add_argument("--runs", type=int, default=3, help="of the demo")
    parser.add_argument("--no-demo", action="store_true", help="count the text alone")
    parser.add_argument("--folder", type=Path, help="of the result; default: benchmarks/results")
    options = parser.parse_args()
    tree = options.tree.resolve()
    rows, figures = text_measures(tree)
    if not options.no_demo:
        base = (options.base or tree / "runs" / "base" / "demo").resolve()
        more_rows, more = demo_measures(tree, base, options.runs)
        rows, figures = rows + more_rows, figures | more
    width = max(len(name) for name, _, _ in rows)
    for name, now, bar in [("measure", "now", "bar"), *rows]:
        print(f"{name:<{width}}  {now:>12}  {bar:>10}")
    settings = {"commit": commit_of(tree), "demo": f"configs/demo.toml, {STEPS} steps, {options.runs} runs"}
    kept = {"folder": options.folder} if options.folder else {}
    print(write_result("house", settings, figures, NOTES, **kept))


NOTES = [
    "Files that differ between runs of the demo are listed as by chance and are not counted.",
    "Names of classes and files are those of the commit.",
]

if __name__ == "__main__":
    main()
