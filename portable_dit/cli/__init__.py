"""The command line. stdout is the answer, stderr is for people; errors are one message and an exit code.

Nothing here imports torch, so that `--help` is quick; commands import what they need when they run.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from portable_dit import __version__
from portable_dit.__main__ import INTERRUPTED
from portable_dit.cli import recipes, weights
from portable_dit.cli.backends import backends
from portable_dit.cli.bench import bench
from portable_dit.cli.conformance import conformance
from portable_dit.cli.doctor import doctor
from portable_dit.cli.evaluate import evaluate
from portable_dit.cli.inspect import inspect
from portable_dit.cli.options import as_flags
from portable_dit.cli.plan import plan
from portable_dit.cli.run import run
from portable_dit.cli.serve import serve
from portable_dit.cli.terminal import prepare_streams, tell
from portable_dit.errors import DoesNotFitError, PortableDitError, RecipeError

BROKEN_PIPE = 141  # 128 + SIGPIPE


class Commands(TyperGroup):
    """Turns what goes wrong inside a command into a message on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            _silence_stdout()  # who read our answer has gone
            raise typer.Exit(BROKEN_PIPE) from None
        except KeyboardInterrupt:
            tell("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except typer.BadParameter as error:
            error.message = _in_our_words(error)
            raise
        except PortableDitError as error:
            if ctx.params.get("debug"):
                raise
            tell(f"error: {error}")
            if isinstance(error, RecipeError | DoesNotFitError) and (flags := as_flags(str(error))):
                tell(flags)
            raise typer.Exit(error.exit_code) from None
        except MemoryError:
            if ctx.params.get("debug"):
                raise
            tell("error: out of memory. Draw a smaller picture, or stop other programs on this machine.")
            raise typer.Exit(1) from None
        except OSError as error:
            if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO):
                raise
            _silence_stdout()
            tell(f"error: stdout cannot be written ({error.strerror}). What was drawn is in its files.")
            raise typer.Exit(1) from None


def _in_our_words(error: typer.BadParameter) -> str:
    """What an option was given and the rule that it breaks; newer typers tell what pydantic says."""
    from pydantic import ValidationError

    from portable_dit.refused_values import why_refused

    cause = error.__cause__
    return why_refused(cause.errors()[0]) if isinstance(cause, ValidationError) else error.message


def _silence_stdout() -> None:
    """The interpreter flushes stdout once more on its way out, which must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"portable-dit {__version__}")
        raise typer.Exit()


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="PORTABLE_DIT_DEBUG", help="Show the traceback of an error.")
    ] = False,
) -> None:
    """Diffusion Transformers on any accelerator: draw, plan and measure from one recipe per machine."""


app.command()(run)
app.command()(serve)
app.command()(plan)
app.command()(inspect)
app.command()(bench)
app.command("eval")(evaluate)
app.add_typer(weights.app, name="weights")
app.command()(doctor)
app.command()(backends)
app.command()(conformance)
app.add_typer(recipes.app, name="recipes")


def main() -> None:
    """The command line, for a process of its own."""
    prepare_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        tell("error: the folder that this was started in does not exist any more. Change to one that does.")
        sys.exit(2)
    app()
