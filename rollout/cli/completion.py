"""`lockstep completion`: print a script for bash, or for zsh, that completes commands, flags and their choices."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.core.args.parser import Parser

SCRIPT = """\
# bash: source <(lockstep completion)      zsh: autoload -U bashcompinit && bashcompinit, then the same
_lockstep() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
      *) case "${{COMP_WORDS[1]}}" in
{flags}
      esac ;;
    esac
    [ "${{word#-}}" = "$word" ] && [ "${{words#-}}" != "$words" ] && words=""
  fi
  COMPREPLY=($(if [ -n "$words" ]; then compgen -W "$words" -- "$word"; else compgen -f -- "$word"; fi))
}}
complete -o filenames -F _lockstep lockstep
"""


def parser() -> Parser:
    """Return the parser of `lockstep completion`."""
    return Parser(
        prog="lockstep completion",
        description="Print a script that completes the words of lockstep: source <(lockstep completion)",
    )


def script(parsers: Mapping[str, Parser]) -> str:
    """Return the script for these commands."""
    flags, choices = [], []
    for command, own in parsers.items():
        shown = own.shown_flags()
        flags.append(f'        {command}) words="{" ".join(shown)}" ;;')
        choices += [f'      "{command} {flag}") words="{" ".join(named)}" ;;' for flag, named in shown.items() if named]
    return SCRIPT.format(commands=" ".join(parsers), choices="\n".join(choices), flags="\n".join(flags))
