"""`llamarl schema [run|sft]`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from llamarl.cli.options import command_parser
from llamarl.config import RunConfig, SftConfig

EPILOG = """Editors complete and check a run file that names the schema in its first line:
  llamarl schema > run.schema.json, then `#:schema ./run.schema.json`
This needs a plugin for TOML: taplo, or Even Better TOML for VS Code."""
KINDS = {"run": RunConfig, "sft": SftConfig}


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = command_parser("schema", "Print the JSON schema of a run file, for editors.", EPILOG)
    parser.add_argument(
        "kind", nargs="?", choices=[*KINDS], default="run", help="schema of run files or of warm starts (run)"
    )
    print(schema_text(parser.parse_args(arguments).kind), end="")
    return 0


def schema_text(kind: str) -> str:
    """Returns the JSON schema of a kind of file, as text."""
    schema = KINDS[kind].model_json_schema()
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema, indent=1) + "\n"
