"""The command line: each command is a file in `commands`, and each error is one sentence."""

from __future__ import annotations

import sys
from collections.abc import Collection

import typer

from rota import __version__
from rota.bench.config import BenchConfig
from rota.commands.adapters import adapters_app
from rota.commands.bench import bench_command
from rota.commands.chat.command import chat_command
from rota.commands.demo import demo_command
from rota.commands.flags import followers_in, spread_lists
from rota.commands.serve import Serve, serve_command, serve_model
from rota.commands.simulate import simulate_command
from rota.core.errors import RotaError
from rota.core.options import options_of
from rota.llm.config import ENGINE_CONFIGS


def main(arguments: list[str] | None = None, serve: Serve = serve_model) -> None:
    """The `rota` command. An error is printed as one sentence, and decides on the exit code."""
    typed = sys.argv[1:] if arguments is None else arguments
    try:
        # Without --api-key: in `--api-key KEY MODEL` the model is not a second key.
        options = options_of(*ENGINE_CONFIGS, BenchConfig).values()
        make_app(serve, followers_in(typed, options))(spread_lists(typed, options))
    except RotaError as error:
        print(f"rota: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def make_app(serve: Serve, followers: Collection[str] = ()) -> typer.Typer:
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.callback()
    def rota(version: bool = _VERSION) -> None:
        """Rota serves many LoRA fine-tunes of one base model, and every adapter gets its turn."""

    app.command(name="serve")(serve_command(serve, followers))
    app.command(name="bench")(bench_command())
    app.command(name="simulate")(simulate_command())
    app.command(name="chat")(chat_command())
    app.command(name="demo")(demo_command(followers=followers))
    app.add_typer(adapters_app(), name="adapters")
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"rota {__version__}")
        raise typer.Exit


_VERSION = typer.Option(False, "--version", help="Print the version and end.", callback=_print_version, is_eager=True)
