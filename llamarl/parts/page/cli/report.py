"""`llamarl report RUN [OTHER ...]`."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from llamarl.cli.options import check_output, command_parser, report_delays, write_into_run, write_output
from llamarl.config import read_text
from llamarl.config.section import not_a_run
from llamarl.parts.page.document import document, whole
from llamarl.parts.page.rollouts import Decode
from llamarl.parts.page.run_data import RunData

PAGE = "report.html"
OF_PAGES = ("config.toml", "forecast.json")
"""Files that identify a folder as a run or a forecast. One is enough."""
EPILOG = "The page needs no network. Running, failed and incomplete runs are shown as far as they are recorded."


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = command_parser("report", "Write one HTML file about runs or forecasts, several side by side.", EPILOG)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, such as runs/demo, or of a forecast")
    parser.add_argument("--output", metavar="FILE", help="where to write it (RUN/report.html)")
    options = parser.parse_args(arguments)
    folders = shown_folders(options.runs)
    output = check_output(options.output) if options.output else folders[0] / PAGE
    described = list[dict[str, object]]()
    with report_delays("report", "reading the runs"):
        for folder in folders:
            data = RunData(folder)
            data.read_all()
            described.append(whole(data, decoder(folder), len(folders)))
    if options.output:
        write_output(output, document(described))
    else:
        write_into_run(output, document(described))
    print(f"{output}  {output.stat().st_size / 1e6:.1f} MB; open it in a browser")
    return 0


def shown_folders(names: Sequence[str]) -> list[Path]:
    """Returns the folders to show. Raises ConfigError if one is neither a run's nor a forecast's."""
    for folder in (folders := [Path(name) for name in names]):
        if not any((folder / file).exists() for file in OF_PAGES):
            raise not_a_run(folder, OF_PAGES)
    return folders


def decoder(folder: Path) -> Decode | None:
    """Returns a function from a token id to its text, by the tokenizer of the run's model. None if the tokenizer is not
    on this machine (which is printed), and for a forecast."""
    from llamarl.data.tokenizer import Tokenizer
    from llamarl.run.hub_pins import base_model

    if (folder / "forecast.json").exists():  # without rollouts
        return None
    try:
        settings = tomllib.loads(read_text(folder / "config.toml", "give the folder of a run"))
        tokenizer = Tokenizer(base_model(folder, settings["model"]["path"], settings.get("output", "")))
        # Some tokenizers drop a leading space, so each token is decoded behind another one.
        anchor = int(tokenizer.encode("a")[-1])
        before = tokenizer.decode([anchor], skip_special=False)
        return lambda token: tokenizer.decode([anchor, token], skip_special=False).removeprefix(before)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        print(
            f"llamarl: {folder}: tokens are shown as numbers because the tokenizer cannot be read: {error}",
            file=sys.stderr,
        )
        return None
