"""The command line: each command is a file in `commands`, and each error is one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import typer

from rota import __version__
from rota.commands.flags import followers_in, spread_lists
from rota.commands.foreign import translated
from rota.core.config import EngineConfig, ServerConfig
from rota.core.errors import ConfigError, RotaError
from rota.core.options import options_of
from rota.extensions import found, needed
from rota.llm.config import ENGINE_CONFIGS

if TYPE_CHECKING:
    from rota.commands.serve import Serve


def serve_model(config: EngineConfig, server: ServerConfig) -> None:
    from rota.commands.serve import serve_model

    serve_model(config, server)


def main(arguments: list[str] | None = None, serve: Serve = serve_model) -> None:
    """The `rota` command. An error is printed as one sentence, and decides on the exit code."""
    typed = sys.argv[1:] if arguments is None else arguments
    try:
        typed = _understood(typed)
        # Without --api-key: in `--api-key KEY MODEL` the model is not a second key.
        options = options_of(*ENGINE_CONFIGS, *_bench_configs()).values()
        make_app(serve, followers_in(typed, options), typed[0] if typed else "")(
            spread_lists(typed, options), prog_name="rota"
        )
    except RotaError as error:
        print(f"rota: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("rota."):
            raise
        # An extension that needs another one, which was left out.
        print(f"rota: This needs {error.name}, and this installation was made without it.", file=sys.stderr)
        sys.exit(ConfigError.exit_code)


def _understood(typed: list[str]) -> list[str]:
    """The same with our flags in the place of vLLM's and SGLang's; each is told of."""
    if typed[:1] not in (["serve"], ["doctor"]):
        return typed
    understood, sentences = translated(typed)
    for sentence in sentences:
        # A server's stderr is its log, where each line may have to be JSON; so may a doctor's stdout.
        print(sentence, file=sys.stdout if typed[0] == "serve" else sys.stderr)
    return understood


def _bench_configs() -> tuple[type, ...]:
    bench = found("bench")
    return (bench.BenchConfig,) if bench else ()


def make_app(serve: Serve, followers: Collection[str] = (), typed: str = "") -> typer.Typer:
    """The commands. If one of them was `typed`, only that one: the others would be imported for nothing."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def rota(version: bool = _VERSION) -> None:
        """Rota serves many LoRA fine-tunes of one base model, and every adapter gets its turn."""

    for name in [typed] if typed in _COMMANDS else _COMMANDS:
        extension, register = _COMMANDS[name]
        if not extension or found(extension):
            register(app, serve, followers)
        elif name == typed:
            needed(extension, f"rota {name}")
    return app


def _serve(app: typer.Typer, serve: Serve, followers: Collection[str]) -> None:
    from rota.commands.flags import grouped_help
    from rota.commands.serve import COMMON_OPTIONS, serve_command

    app.command(name="serve", cls=grouped_help(COMMON_OPTIONS))(serve_command(serve, followers))


def _doctor(app: typer.Typer, _: Serve, followers: Collection[str]) -> None:
    from rota.commands.doctor import doctor_command
    from rota.commands.flags import grouped_help
    from rota.commands.serve import COMMON_OPTIONS

    groups = {"Findings": ("json",), **COMMON_OPTIONS}
    app.command(name="doctor", cls=grouped_help(groups))(doctor_command(followers))


def _bench(app: typer.Typer, *_: object) -> None:
    from rota.commands.bench import bench_command

    app.command(name="bench")(bench_command())


def _simulate(app: typer.Typer, *_: object) -> None:
    from rota.commands.simulate import simulate_command

    app.command(name="simulate")(simulate_command())


def _chat(app: typer.Typer, *_: object) -> None:
    from rota.commands.chat.command import chat_command

    app.command(name="chat")(chat_command())


def _demo(app: typer.Typer, _: Serve, followers: Collection[str]) -> None:
    from rota.commands.demo import demo_command

    app.command(name="demo")(demo_command(followers=followers))


def _adapters(app: typer.Typer, *_: object) -> None:
    from rota.commands.adapters.app import adapters_app

    app.add_typer(adapters_app(), name="adapters")


# With the extension that a command belongs to, if it belongs to one.
_COMMANDS: dict[str, tuple[str, Callable[[typer.Typer, Serve, Collection[str]], None]]] = {
    "serve": ("", _serve),
    "doctor": ("", _doctor),
    "bench": ("bench", _bench),
    "simulate": ("sim", _simulate),
    "chat": ("chat", _chat),
    "demo": ("workload", _demo),
    "adapters": ("", _adapters),
}


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"rota {__version__}")
        raise typer.Exit


_VERSION = typer.Option(False, "--version", help="Print the version and end.", callback=_print_version, is_eager=True)
