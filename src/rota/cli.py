"""The command line: every flag is a field of a config dataclass, and so is every name in a config file."""

from __future__ import annotations

import inspect
import sys
import tomllib
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import typer

from rota import __version__
from rota.core.config import EngineConfig, ServerConfig
from rota.core.errors import ConfigError, RotaError
from rota.core.options import Option, build, options_of, refuse_unknown
from rota.llm import ENGINE_CONFIGS, build_device, engine_config, locate_model

SERVE_CONFIGS = (*ENGINE_CONFIGS, ServerConfig)

Serve = Callable[[EngineConfig, ServerConfig], None]


def serve_model(config: EngineConfig, server: ServerConfig) -> None:
    """Serve a model over HTTP until told to stop, the engine in a process of its own."""
    # Here, so that `rota --help` does not wait for them.
    from rota.runtime.supervisor import SupervisedService
    from rota.server.app import create_app
    from rota.server.listen import listen
    from rota.text.tokenizer import Tokenizer

    config = locate_model(config)
    assert config.model.model_path is not None
    folder = Path(config.model.model_path)
    name = server.served_model_name or folder.resolve().name
    tokenizer = Tokenizer(folder)
    service = SupervisedService(partial(build_device, config), config)
    app = create_app(service, tokenizer, name, str(folder))
    listen(app, service, server, lambda url: print(f"Rota serves {name} at {url}", flush=True))


def main(arguments: list[str] | None = None, serve: Serve = serve_model) -> None:
    """The `rota` command; what is wrong with a request for service is one sentence and exit code 2."""
    try:
        make_app(serve)(arguments)
    except RotaError as error:
        print(f"rota: {error}", file=sys.stderr)
        sys.exit(2)


def make_app(serve: Serve) -> typer.Typer:
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.callback()
    def rota(
        version: bool = typer.Option(
            False, "--version", help="Print the version and end.", callback=_print_version, is_eager=True
        ),
    ) -> None:
        """Rota serves many LoRA fine-tunes of one base model, and every adapter gets its turn."""

    app.command(name="serve")(_serve_command(serve))
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"rota {__version__}")
        raise typer.Exit


def _serve_command(serve: Serve) -> Callable[..., None]:
    """A function whose signature has a parameter for every option: that is what typer makes flags of."""
    options = options_of(*SERVE_CONFIGS)

    def command(context: typer.Context, **values: Any) -> None:
        """Serve MODEL over HTTP: a folder in Hugging Face format. Without it, the small built-in model."""
        given = {name: value for name, value in values.items() if _is_given(context, name)}
        model, file = given.pop("model", None), given.pop("config", None)
        chosen = read_config_file(file) if file else {}
        chosen |= {
            name: options[name].kind(value.value) if isinstance(value, Enum) else value for name, value in given.items()
        }
        if model is not None and chosen.setdefault("model_path", model) != model:
            raise ConfigError(f"The model is named twice: {model} and {chosen['model_path']}; name it once.")
        quiet = chosen.pop("quiet", False)
        serve(engine_config(chosen, quiet), build(ServerConfig, chosen))

    parameters = [
        _parameter("context", typer.Context),
        _parameter("model", str | None, typer.Argument(None, help="The model's folder, as with --model-path.")),
        _parameter("config", Path | None, typer.Option(None, help="A TOML file that sets any of these options.")),
        *map(_flag, options.values()),
        _parameter("quiet", bool, typer.Option(False, "--quiet", "--disable-tqdm", help="Show no progress bars.")),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _flag(option: Option) -> inspect.Parameter:
    name = option.name.replace("_", "-")
    if option.kind is bool:
        default = typer.Option(option.default, f"--{name}/--no-{name}", help=option.help)
        return _parameter(option.name, bool, default)
    if option.choices:
        choices = Enum(option.name, {str(choice): str(choice) for choice in option.choices})  # type: ignore[misc]
        default = typer.Option(choices(str(option.default)), f"--{name}", help=option.help)
        return _parameter(option.name, choices, default)
    return _parameter(option.name, option.kind | None, typer.Option(option.default, f"--{name}", help=option.help))


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether a value was typed, and is not the default: typed ones go before those of a file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def read_config_file(path: Path) -> dict[str, Any]:
    """Options by name from a TOML file; dashes and underscores are the same."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.") from error
    given = {name.replace("-", "_"): value for name, value in content.items()}
    try:
        refuse_unknown(given, *SERVE_CONFIGS)
        known = options_of(*SERVE_CONFIGS)
        return {name: known[name].check(value) for name, value in given.items()}
    except ConfigError as error:
        raise ConfigError(f"In {path}: {error}") from None
