"""`llamarl completion bash|zsh|fish`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.cli.main import COMMANDS, command_module
from llamarl.cli.options import ParserAsked, asking_for_parser, command_parser, setting_options
from llamarl.config import ConfigError
from llamarl.config.load import packaged_names

EPILOG = """bash: eval "$(llamarl completion bash)" in ~/.bashrc
zsh:  eval "$(llamarl completion zsh)" in ~/.zshrc, after compinit
fish: llamarl completion fish > ~/.config/fish/completions/llamarl.fish"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """Words that a shell offers for a command."""

    options: tuple[str, ...]
    names: tuple[str, ...]
    """Values of arguments, other than files."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = command_parser("completion", "Print the script with which a shell completes commands and options.", EPILOG)
    parser.add_argument("shell", choices=[*SHELLS])
    shell = parser.parse_args(arguments).shell
    print(SHELLS[shell]({name: completed(name) for name in COMMANDS}), end="")
    return 0


def completed(command: str) -> Completed:
    """Returns options and names of a command. A command whose part is not installed has none."""
    try:
        module = command_module(command)
    except ConfigError:
        return Completed(options=(), names=())
    try:
        with asking_for_parser():
            module.main([])
        raise AssertionError(f"{command} has no parser")
    except ParserAsked as found:
        asked = found
    parser, takes_settings = asked.parser, asked.takes_settings
    options, names = list[str](), list[str]()
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            options += action.option_strings
        if not action.option_strings:
            names += map(str, action.choices or (_files(command) if action.dest == "config" else ()))
    if takes_settings:
        options += setting_options()
    return Completed(options=tuple(dict.fromkeys(options)), names=tuple(names))


def _files(command: str) -> list[str]:
    """Returns names of packaged files that a command accepts. Files of warm starts are for `sft` only."""
    return [name for name in packaged_names() if command == "sft" or not name.endswith("_sft")]


def _bash(commands: dict[str, Completed]) -> str:
    cases = "".join(
        f'    {name}) options="{" ".join(one.options)}" names="{" ".join(one.names)}" ;;\n'
        for name, one in commands.items()
    )
    return f"""_llamarl() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} options= names=
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "{" ".join(commands)} --help --version" -- "$current"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{cases}  esac
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  else
    COMPREPLY=($(compgen -W "$names" -- "$current") $(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _llamarl llamarl
"""


def _zsh(commands: dict[str, Completed]) -> str:
    cases = "".join(
        f"    {name}) options=({' '.join(one.options)}) names=({' '.join(one.names)}) ;;\n"
        for name, one in commands.items()
    )
    return f"""#compdef llamarl
_llamarl() {{
  local -a options names
  if (( CURRENT == 2 )); then
    compadd -- {" ".join(commands)}
    return
  fi
  case $words[2] in
{cases}  esac
  if [[ $PREFIX == -* ]]; then
    compadd -- $options
  else
    compadd -- $names
    _files
  fi
}}
compdef _llamarl llamarl
"""


def _fish(commands: dict[str, Completed]) -> str:
    lines = list[str]()
    for name, one in commands.items():
        meaning = COMMANDS[name].replace("'", "\\'")
        lines.append(f"complete -c llamarl -n __fish_use_subcommand -f -a {name} -d '{meaning}'")
        seen = f"complete -c llamarl -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{seen} -l {option[2:]}" for option in one.options if option.startswith("--")]
        lines += [f"{seen} -a '{' '.join(one.names)}'"] * bool(one.names)
    return "".join(f"{line}\n" for line in lines)


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
