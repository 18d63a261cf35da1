"""Usage errors as a user meets them: one line on stderr, exit code 2, whoever noticed them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from attnmatrix.harness.registry import UsageError

PROGRAM = "attnmatrix"
_PARSER_ERROR: type[BaseException] = typer.BadParameter.__mro__[1]
"""Every complaint of typer's command line parser: the class that BadParameter specialises, under the name that this version has for it."""


def run_app(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run a command line; returns its exit code. Without arguments the program, and a group of commands, shows its help."""
    words = [*arguments]
    if words in ([], *([group.name] for group in app.registered_groups)):
        words.append("--help")
    try:
        return app(args=words, prog_name=PROGRAM, standalone_mode=False) or 0
    except UsageError as error:
        return _complain(PROGRAM, str(error))
    except _PARSER_ERROR as error:
        return _complain(*_parser_words(error))
    except typer.Abort:
        return 130


def _parser_words(error: BaseException) -> tuple[str, str]:
    """The command that was typed, and what is wrong with it, with the commands that are known or where its options are listed."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else PROGRAM
    known = getattr(getattr(context, "command", None), "commands", {})
    more = f"known: {', '.join(known)}" if known else f"see {command} --help"
    return command, f"{getattr(error, 'format_message', error.__str__)().rstrip('.')}; {more}"


def _complain(command: str, message: str) -> int:
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr)
    return 2
