"""How easy the code is to find one's way in: sizes of rooms and parts, borders, names, and what a demo passes through.

    python benchmarks/house/measure.py [--tree FOLDER] [--base FOLDER] [--runs 3] [--no-demo] [--folder FOLDER]

Counts any checkout of this repository in the same way, whether its parts are folders below `llamarl/parts/` or lie
among the rest: `sorting.toml` says which file belongs to which room of the core or part, and what each may hold. A file
that is not sorted, or twice, is refused.

- Code lines have no blank lines, comments and docstrings. Only Python counts.
- An edge is an importer and what it imports, once each, whatever is imported; imports inside functions and for types
  alone count. Of a file that belongs to two, each share is a module of its own.
- A docstring stands at the top of a module, class or function, or below an assignment. One that begins with one of
  `source.OPENINGS` needs the line above it to be understood.
- Class names that two classes have, underscores aside, and those whose last word ends in -ing. Members of families,
  named after their files, may share theirs.
- Files and record types that a demo of four steps enters, executors in threads (`demo.py` says how that is counted):
  what every one of `--runs` runs enters, as timers come by chance. The base model is made once, in about a minute.
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
from source import Sorting, by_string, cannot_be_read_alone, class_names, crossing, sizes

HERE = Path(__file__).parent
STEPS, DEADLINE_S = 4, 900.0
Row = tuple[str, str, str]
"""A measure, what it is now, and what it is to be at most."""


def text_measures(tree: Path) -> tuple[list[Row], dict[str, Any]]:
    """Without running anything."""
    sorting = Sorting(tree)
    counts, edges, docs, names = sizes(sorting), crossing(sorting), cannot_be_read_alone(sorting), class_names(sorting)
    rooms = {
        kind: {
            name: {"files": counts["files"][name], "code_lines": counts["lines"][name], "budget": row["budget"]}
            for name, row in table.items()
        }
        for kind, table in (("rooms", sorting.rooms), ("parts", sorting.parts))
    }
    over = [
        f"{name} {row['code_lines']} of {row['budget']}"
        for table in rooms.values()
        for name, row in table.items()
        if row["code_lines"] > row["budget"]
    ]
    core, parts = (sum(row["code_lines"] for row in table.values()) for table in rooms.values())
    readme = len((tree / "README.md").read_text(encoding="utf-8").splitlines())
    rows = [
        (f"{kind} {name}: code lines", f"{row['code_lines']:,}", f"{row['budget']:,}")
        for kind, table in (("core", rooms["rooms"]), ("part", rooms["parts"]))
        for name, row in table.items()
    ]
    rows += [
        ("code lines of the core", f"{core:,}", f"{sorting.totals['core']:,}"),
        ("code lines of parts", f"{parts:,}", f"{sorting.totals['parts']:,}"),
        ("rooms and parts over their budget", str(len(over)), "0"),
        ("imports from the core into parts", str(len(edges["core_to_part"])), "0"),
        ("imports between parts", str(len(edges["part_to_part"])), "0"),
        ("docstrings that cannot be read alone", f"{docs['cannot_be_read_alone']} ({docs['share']:.1%})", "0"),
        ("class names with two bearers (families aside)", str(len(names["double"])), "0"),
        ("class names that are gerunds", str(len(names["gerunds"])), "0"),
        ("lines of the README", str(readme), "about 100"),
    ]
    return rows, {
        "layout": "parts are folders" if sorting.has_parts else "parts lie among the rest",
        "core_code_lines": core,
        "part_code_lines": parts,
        **rooms,
        "over_budget": over,
        "edges": edges,
        "parts_named_in_texts_of_the_core": by_string(sorting),
        "docstrings": docs,
        "class_names": names,
        "readme_lines": readme,
    }


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
        ("files that the steps of the demo enter", str(steps["num_files"]), "85"),
        ("record types that they build", str(steps["num_records"]), "45"),
        ("files on the way of a prompt to a gradient", str(way["num_files"]), "48"),
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
