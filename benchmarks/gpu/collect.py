"""One result of the rows of all calls of `check.py`: `benchmarks/results/gpu-DATE.json`.

python benchmarks/gpu/collect.py FOLDER/gpu-rows-*.jsonl [--output benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path

import bars

sys.path.append(str(Path(__file__).parents[1]))

from _record import RESULTS, write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path, help="one file of each call, the oldest first")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = list[bars.Row]()
    for path in options.rows:
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):  # the last line of a call that was killed
                rows.append(json.loads(line))
    machines = [row["machine"] for row in rows if "machine" in row]
    name = "gpu" if any(machine["gpu"] for machine in machines) else "gpu-toy"
    figures = {"machines": machines, "bars": bars.table(rows), "rows": [row for row in rows if "machine" not in row]}
    print("\n".join(figures["bars"]))
    print(write_result(name, {}, figures, [], options.output))


if __name__ == "__main__":
    main()
