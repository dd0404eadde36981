"""`rota serve`: a model over HTTP, with its adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from rota.commands.flags import make_command, parameter, read_config_file
from rota.core.config import EngineConfig, ServerConfig
from rota.core.errors import ConfigError
from rota.core.lora_paths import parse_lora_paths
from rota.core.options import build, options_of
from rota.llm import ENGINE_CONFIGS, build_device, engine_config, locate_model

SERVE_CONFIGS = (*ENGINE_CONFIGS, ServerConfig)

Serve = Callable[[EngineConfig, ServerConfig], None]


def serve_model(config: EngineConfig, server: ServerConfig) -> None:
    """Serve a model over HTTP until told to stop, the engine in a process of its own."""
    # Here, so that `rota --help` does not wait for them.
    from rota.runtime.registry import Registry
    from rota.runtime.stocked import StockedService
    from rota.runtime.supervisor import SupervisedService
    from rota.server.app import create_app
    from rota.server.listen import listen
    from rota.text.tokenizer import Tokenizer

    config = locate_model(config)
    assert config.model.model_path is not None
    folder = Path(config.model.model_path)
    name = server.served_model_name or folder.resolve().name
    tokenizer = Tokenizer(folder)
    registry = Registry(name, str(folder))
    adapters = [registry.add(entry) for entry in parse_lora_paths(config.lora.lora_paths)]
    service = StockedService(SupervisedService(partial(build_device, config), config), adapters)
    app = create_app(service, tokenizer, registry)
    listen(app, service, server, lambda url: print(f"Rota serves {name} at {url}", flush=True))


def serve_command(serve: Serve) -> Callable[..., None]:
    def act(given: dict[str, Any]) -> None:
        model, file, quiet = given.pop("model", None), given.pop("config", None), given.pop("quiet", False)
        chosen = (read_config_file(file, *SERVE_CONFIGS) if file else {}) | given
        if model is not None and chosen.setdefault("model_path", model) != model:
            raise ConfigError(f"The model is named twice: {model} and {chosen['model_path']}; name it once.")
        serve(engine_config(chosen, quiet), build(ServerConfig, chosen))

    return make_command(
        act,
        "Serve MODEL over HTTP: a folder in Hugging Face format. Without it, the small built-in model.",
        options_of(*SERVE_CONFIGS).values(),
        parameter("model", str | None, typer.Argument(None, help="The model's folder, as with --model-path.")),
        parameter("config", Path | None, typer.Option(None, help="A TOML file that sets any of these options.")),
        parameter("quiet", bool, typer.Option(False, "--quiet", "--disable-tqdm", help="Show no progress bars.")),
    )
