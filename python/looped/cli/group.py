"""The command line as a whole: its options, and how errors become one line and an exit code."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import click

ERROR_CODE = 2  # of bad use
LACK = ("memory", "Storage size calculation overflowed")  # of memory, in PyTorch's RuntimeErrors


class _Commands(click.Group):
    """Turns the library's errors into one line and an exit code; --traceback shows where they came from."""

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.params.get("traceback"):
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            click.echo(f"looped: {str(stop) or 'interrupted'}", err=True)
            ctx.exit(130)
        except ValueError as error:
            click.echo(f"looped: {error}", err=True)
            ctx.exit(ERROR_CODE)
        except TypeError as error:  # PyTorch's go on with all signatures there are, or with a stack
            click.echo(f"looped: {error}".split("\n")[0], err=True)
            ctx.exit(ERROR_CODE)
        except (MemoryError, RuntimeError) as error:
            lacks = isinstance(error, MemoryError) or any(word in str(error) for word in LACK)
            if not lacks:
                raise
            click.echo(f"looped: not enough memory: {str(error) or 'take smaller sizes'}".split("\n")[0], err=True)
            ctx.exit(1)
        except (OSError, FloatingPointError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror and error.filename else str(error)
            name = f" {error.filename}" if isinstance(error, OSError) and error.filename else ""
            click.echo(f"looped: {reason}{':' if name else ''}{name}", err=True)
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="looped")
@click.option("--traceback", is_flag=True, help="Show where an error came from, for bug reports.")
def main(traceback: bool) -> None:
    """Looped transformers: evaluate, measure, train, experiment, inspect."""
    logging.basicConfig(level=logging.INFO, format="looped: %(message)s", stream=sys.stderr)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="sklearn")
