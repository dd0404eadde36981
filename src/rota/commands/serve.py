"""`rota serve` serves a model and its adapters over HTTP."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rota import __version__
from rota.commands.flags import config_file, help_all, make_command, parameter, quiet_flag, with_file
from rota.commands.foreign import also_called
from rota.core.config import EngineConfig, ServerConfig
from rota.core.errors import ConfigError
from rota.core.lora_paths import parse_lora_path
from rota.core.options import Option, build, options_of
from rota.extensions import found, needed
from rota.llm.config import (
    ENGINE_CONFIGS,
    build_device,
    engine_config,
    first_adapters,
    first_of,
    locate_model,
    locator_for,
    prefix_for,
    told_later,
)
from rota.observe.journey import OnEnd
from rota.runtime.world import Device

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rota.runtime.blame import Blame
    from rota.runtime.client import EngineClient
    from rota.runtime.registry import Registry
    from rota.server.access.access import Access
    from rota.server.access.key_file import KeySource
    from rota.server.context import ServiceTask
    from rota.sources.prefix import Prefix


SERVE_CONFIGS = (*ENGINE_CONFIGS, ServerConfig)
# What `rota serve --help` shows: the twenty options that most servers need. `--help-all` shows all of them.
COMMON_OPTIONS = {
    "Model": ("model_path", "dtype", "quantization", "context_length"),
    "Adapters": ("lora_paths", "adapter_root", "lora_resolver"),
    "Memory": ("mem_fraction_static", "kv_cache_dtype", "max_loras_per_batch", "max_loaded_loras"),
    "Scheduling": ("max_running_requests", "lora_policy", "lora_max_stall_ms"),
    "Server": ("host", "port", "api_key_file", "served_model_name"),
    "Several devices": ("tensor_parallel_size", "data_parallel_size"),
}

LOG = logging.getLogger("rota.start")
Serve = Callable[[EngineConfig, ServerConfig], None]


def serve_model(
    config: EngineConfig,
    server: ServerConfig,
    on_ready: Callable[[str], None] | None = None,
    make_device: Callable[[EngineConfig], Device[Any]] = build_device,
) -> None:
    """Serve a model over HTTP until a signal, the engine in its own process. `on_ready` gets the address.

    Of several ranks that torchrun has started only rank 0 serves; the others follow until rank 0 ends.
    """
    # Imported here, so that `rota --help` does not wait for them.
    from rota.commands.engines import counted
    from rota.commands.logged import build_rank
    from rota.observe.logs import logs_as
    from rota.observe.trace_export import exported_traces
    from rota.server.access.key_file import KeySource

    is_on_ray = config.model.data_parallel_backend == "ray"
    if config.model.tensor_parallel_size > 1:
        ranks = needed("ranks", "--tensor-parallel-size")
        place = ranks.torchrun_place(config.model.tensor_parallel_size, os.environ)
        if place is not None and (config.model.data_parallel_size != 1 or is_on_ray):
            raise ConfigError("torchrun starts the ranks of one copy of the model; use --data-parallel-size 1 with it.")
        if place is not None and place.rank > 0:
            ranks.attend(partial(build_rank, make_device, server), locate_model(config), place)
            return
    config = counted(config)
    source = KeySource(server.api_key, server.api_key_file, config.lora.adapter_root)
    with (
        logs_as(server.log_format, server.log_level, config.quiet),
        exported_traces(server.otel, __version__) as on_finish,
        _hangups(source.ask),
        _exchange_place(config, 1 if is_on_ray else config.model.replicas) as placed,
    ):
        _serve(placed, server, source, on_ready, make_device, on_finish)


@contextmanager
def _hangups(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on SIGHUP while the block runs.

    By itself SIGHUP would end the process, also where it was meant to read keys. A terminal that closes sends SIGHUP
    too, and then the server ends as on SIGTERM, unless `nohup` has started it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread may set handlers
        return
    is_tied = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN

    def heed(_signal: int, _frame: object) -> None:
        if is_tied and not _has_terminal():
            signal.raise_signal(signal.SIGTERM)
        else:
            act()

    before = signal.signal(signal.SIGHUP, heed)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _has_terminal() -> bool:
    """Whether input or output is a terminal. One that was closed is none any more."""
    return any(map(os.isatty, (0, 1, 2)))


def _exchange_place(config: EngineConfig, replicas: int) -> AbstractContextManager[EngineConfig]:
    """The config of all replicas, with a place to exchange reports while the block lasts, if they need one."""
    if replicas == 1:
        return nullcontext(config)
    place: AbstractContextManager[EngineConfig] = needed("replicas", "--data-parallel-size").exchange_place(
        config, replicas
    )
    return place


def _serve(
    config: EngineConfig,
    server: ServerConfig,
    source: KeySource,
    on_ready: Callable[[str], None] | None,
    make_device: Callable[[EngineConfig], Device[Any]],
    on_finish: Sequence[OnEnd],
) -> None:
    from rota.runtime.blame import Blame, kept_beside
    from rota.server.access.exposure import check_exposure, describe, load_refusal
    from rota.server.door.door import Door, hold_metrics_port, hold_port

    keys = source.read()
    check_exposure(server, keys)
    door = Door(server)
    # Held before the model is read, so that a port that is taken is refused at once.
    holder, metrics_holder = hold_port(server.host, server.port), hold_metrics_port(server)
    blame, prefix = Blame(kept_beside(server.api_key_file)), prefix_for(config.lora)
    config, registry, service = _new_engine(config, server, make_device, blame)
    # The engine starts, and the server gets ready beside it: the web framework and the tokenizer are loaded meanwhile.
    LOG.info("Starting: %s.", "imports")
    with service.begun():
        from rota.commands.engines import announce
        from rota.server.access.access import Access
        from rota.server.listen import MetricsPort, listen

        metrics_port = MetricsPort(metrics_holder, server) if metrics_holder else None
        own_name = None if server.allow_anyone else server.host
        refusal, origins = load_refusal(server, keys, config.lora.adapter_root), server.allowed_origins
        access = Access(registry, keys, refusal, own_name=own_name, allowed_origins=origins, blame=blame)
        watch = [partial(source.watch, access.replace_keys)] if source.path else []
        app = _new_app(config, server, registry, service, access, prefix, on_finish, watch)
        others = [describe(server, keys), metrics_port.sentence if metrics_port else "", door.advice]

        def say_ready(url: str) -> None:
            # As text the log would say what is printed.
            is_logged = server.log_format == "json"
            announce(registry.base.name, url, service.state, config.policy, others, is_logged=is_logged)
            if on_ready:
                on_ready(url)

        listen(holder, app, service, server, say_ready, partial(print, flush=True), door, metrics_port)


def _new_engine(
    config: EngineConfig, server: ServerConfig, make_device: Callable[[EngineConfig], Device[Any]], blame: Blame
) -> tuple[EngineConfig, Registry, EngineClient]:
    """The engine with its adapters, not yet begun, and its config with the model's folder."""
    from rota.commands.engines import engine_service
    from rota.runtime.client import EngineClient, early_of
    from rota.runtime.registry import Registry
    from rota.runtime.supervisor import AdapterLook

    asked_path = config.model.model_path
    config = locate_model(config)
    assert config.model.model_path is not None
    folder = Path(config.model.model_path)
    registry = Registry(server.served_model_name or _model_name(asked_path, folder), str(folder))
    entries = first_adapters(config)
    first = AdapterLook(partial(first_of, config, entries))
    config = told_later(config)
    adapters = [registry.add(entry) for entry in entries]
    early = early_of(len(adapters), config.lora.max_loaded_loras)
    service = engine_service(config, server, make_device, first, blame)
    return config, registry, EngineClient(service, adapters, early)


def _new_app(
    config: EngineConfig,
    server: ServerConfig,
    registry: Registry,
    service: EngineClient,
    access: Access,
    prefix: Prefix | None,
    on_finish: Sequence[OnEnd],
    service_tasks: Sequence[ServiceTask],
) -> FastAPI:
    from rota.server.adapters.manager import locating
    from rota.server.app import ROUTES, create_app, routes_of_dialects
    from rota.server.context import AppParts
    from rota.server.errors import unheard
    from rota.text.tokenizer import Tokenizer

    dashboard = needed("dashboard", "--journal-dir") if server.journal_dir else found("dashboard")
    pace = config.policy.reader_pace
    feed = dashboard.Feed(registry, lambda: service.state, pace) if dashboard else None
    parts = AppParts(
        service=service,
        tokenizer=Tokenizer(registry.base.path),
        registry=registry,
        access=access,
        config=server,
        engine=config,
        locate=locating(locator_for(config.lora)),
        prefix=prefix,
        watchers=[feed] if feed else (),
        on_finish=on_finish,
        on_error=feed.note_error if feed else unheard,
        service_tasks=[*service_tasks, partial(dashboard.keep_history, feed)] if dashboard else service_tasks,
    )
    page = dashboard.routes_of(dashboard.Viewers(feed, service.send), server.journal_dir) if dashboard else ()
    app = create_app(parts, [*ROUTES, *routes_of_dialects(), *page])
    if dashboard:
        dashboard.connect(feed, app.state.context)
    return app


def _model_name(asked_path: str | None, folder: Path) -> str:
    """The folder's name. A model from a hub has the hub's name, because its folder is named after a version."""
    if asked_path is None or Path(asked_path).expanduser().exists():
        return folder.resolve().name
    return asked_path


def serve_command(serve: Serve, followers: Collection[str] = ()) -> Callable[..., None]:
    """`followers` are values that were typed after another value of a list, without a flag of their own."""

    def act(given: dict[str, Any]) -> None:
        chosen = with_file(given, *SERVE_CONFIGS)
        serve(chosen_engine(chosen, followers), build(ServerConfig, chosen))

    return make_command(
        act,
        "Serve MODEL over HTTP: a folder in Hugging Face format or a name on a hub. Without MODEL: the built-in model.",
        serve_options(),
        model_argument(),
        config_file(),
        quiet_flag("No progress bars, and only warnings in the log."),
        help_all(),
    )


def serve_options() -> list[Option]:
    """Every option of `rota serve`; the help says what else it may be called."""
    return [replace(one, help=one.help + also_called(one.name)) for one in options_of(*SERVE_CONFIGS).values()]


def model_argument() -> inspect.Parameter:
    """MODEL. `chosen_engine` reads it as --model-path."""
    sentence = "The model's folder or hub name, as with --model-path."
    return parameter("model", str | None, typer.Argument(None, metavar="MODEL", help=sentence))


def chosen_engine(chosen: dict[str, Any], followers: Collection[str]) -> EngineConfig:
    """The engine's config from a command's options. Raises ConfigError if the model is not clear."""
    model = chosen.get("model")
    model_path = chosen.get("model_path", model)
    if model is not None and model_path != model:
        raise ConfigError(f"The model is named twice: {model} and {model_path}; name it once.")
    if model_path is None:
        _refuse_doubtful(chosen.get("lora_paths", ()), followers)
    return engine_config({**chosen, "model_path": model_path}, chosen.get("quiet", False))


def _refuse_doubtful(lora_paths: Collection[str], followers: Collection[str]) -> None:
    """In `--lora-paths a=/x /models/llama` the second path may be the model, so it is refused."""
    for entry in followers and lora_paths:
        if entry in followers and parse_lora_path(entry).path == entry.strip():
            raise ConfigError(
                f"{entry}, after --lora-paths, may be an adapter or the model. If it is the model, name it before "
                "--lora-paths or with --model-path. If it is an adapter of the built-in model, say NAME=PATH."
            )
