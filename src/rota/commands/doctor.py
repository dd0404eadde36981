"""`rota doctor` looks at the machine and says what `rota serve` would do here with the same flags."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from rota.commands.flags import config_file, help_all, make_command, parameter, quiet_flag, with_file
from rota.commands.serve import SERVE_CONFIGS, chosen_engine, model_argument, serve_options
from rota.core.config import EngineConfig, ServerConfig
from rota.core.errors import ModelError, RotaError
from rota.core.lora_paths import LoraPath
from rota.core.options import build

if TYPE_CHECKING:
    from rota.engine.build import Forecast

# What the driver says of itself where there is one.
DRIVER = Path("/proc/driver/nvidia/version")
GIGABYTE = 1e9

Level = Literal["ok", "warning", "error"]
Told = Iterator[tuple[Level, str]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one thing that a server needs."""

    level: Level
    about: str
    sentence: str


def doctor_command(followers: Collection[str] = ()) -> Callable[..., None]:
    """`followers`: see `serve_command`."""

    def act(given: dict[str, Any]) -> None:
        as_json = given.pop("json", False)
        examination = Examination()
        if examination.look("flags", lambda: examination.read(with_file(given, *SERVE_CONFIGS), followers)):
            examination.examine()
        if as_json:
            print(json.dumps([asdict(one) for one in examination.findings], indent=1))
        else:
            for one in examination.findings:
                print(f"{one.level:8} {one.about:9} {one.sentence}")
        if any(one.level == "error" for one in examination.findings):
            raise typer.Exit(1)

    return make_command(
        act,
        "Look at this machine, and say what `rota serve` would do with the same flags. The exit code is 1 if it would "
        "not serve. Nothing is served, and no weights are read.",
        serve_options(),
        model_argument(),
        parameter("json", bool, typer.Option(False, "--json", help="Print the findings as JSON.")),
        config_file(),
        quiet_flag("No progress bars."),
        help_all(),
    )


class Examination:
    """Looks at one thing after the other, with what a start itself would use; a refusal there is a finding here."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._config = EngineConfig()
        self._server = ServerConfig()

    def look(self, about: str, tell: Callable[[], Told]) -> bool:
        """Whether it can be gone on from there."""
        begins_at = len(self.findings)
        try:
            for level, sentence in tell():
                self.findings.append(Finding(level, about, sentence))
        except RotaError as error:
            self.findings.append(Finding("error", about, str(error)))
        return all(one.level != "error" for one in self.findings[begins_at:])

    def read(self, given: Mapping[str, Any], followers: Collection[str]) -> Told:
        self._config = chosen_engine(dict(given), followers)
        self._server = build(ServerConfig, given)
        yield "ok", "These flags can stand together."

    def examine(self) -> None:
        can_compute = self.look("machine", self._machine)
        self.look("clients", self._clients)
        self.look("port", self._port)
        if can_compute:
            self.look("model", self._model)

    def _machine(self) -> Told:
        # Imported here and below, so that `rota --help` does not wait for torch.
        import torch

        from rota.commands.engines import counted
        from rota.engine.device import choose_device, free_memory
        from rota.machine import usable_processors

        if DRIVER.exists() and not torch.cuda.is_available():
            yield "warning", f"There is an NVIDIA driver, but PyTorch {torch.__version__} finds no GPU."
        self._config = counted(self._config)
        model = self._config.model
        is_on_ray = model.data_parallel_backend == "ray"
        device = choose_device(model, 0 if is_on_ray else model.replicas * model.tensor_parallel_size - 1)
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            free, total = torch.cuda.mem_get_info(device)
            driver = re.search(r"\d+\.[\d.]+", DRIVER.read_text("utf-8")) if DRIVER.exists() else None
            yield "ok", f"The model runs on {found.name}, capability {found.major}.{found.minor}."
            yield (
                "ok",
                f"The driver is {driver[0] if driver else 'not known'}, and PyTorch's CUDA {torch.version.cuda}.",
            )
            yield "ok", f"{free / GIGABYTE:.1f} of {total / GIGABYTE:.1f} GB of the GPU's memory are free."
            yield _kernel_cache()
        else:
            yield "ok", f"The model runs on the CPU, with {usable_processors()} processors."
        yield "ok", f"{free_memory(torch.device('cpu')) / GIGABYTE:.1f} GB of host memory are free."

    def _clients(self) -> Told:
        from rota.server.access.exposure import check_exposure, describe
        from rota.server.access.key_file import KeySource
        from rota.server.door.door import Door

        server = self._server
        keys = KeySource(server.api_key, server.api_key_file, self._config.lora.adapter_root).read()
        check_exposure(server, keys)
        yield "ok", describe(server, keys)
        if advice := Door(server).advice:
            yield "warning", advice

    def _port(self) -> Told:
        from rota.server.door.door import hold_metrics_port, hold_port

        for hold in (lambda: hold_port(self._server.host, self._server.port), partial(hold_metrics_port, self._server)):
            if holder := hold():
                with holder:
                    yield "ok", "Port {1} of {0} is free.".format(*holder.getsockname())

    def _model(self) -> Told:
        from huggingface_hub import snapshot_download

        from rota.engine.build import forecast
        from rota.engine.folders.hub import model_folder
        from rota.llm.config import first_adapters, locate_model, with_first

        name = self._config.model.model_path
        if name is not None and not Path(name).expanduser().exists():
            try:
                model_folder(name, partial(snapshot_download, local_files_only=True))
            except ModelError:
                yield "warning", f"{name} is not on this machine: a start looks for it on a hub, and downloads it."
                return
        config = locate_model(self._config)
        entries = first_adapters(config)
        found = forecast(with_first(config, entries))
        chosen, capacity = found.chosen, found.capacity
        yield (
            "ok",
            f"{chosen.folder.resolve().name} ({chosen.whole.architecture}) is served, up to "
            f"{capacity.max_sequence_tokens:,} tokens a request. There is KV for about "
            f"{capacity.blocks * capacity.block_size:,} tokens.",
        )
        self.look("adapters", lambda: _adapters(config, found, entries))


def _adapters(config: EngineConfig, found: Forecast, entries: Collection[LoraPath]) -> Told:
    import torch

    from rota.commands.engines import adapter_memory
    from rota.engine.device import free_memory
    from rota.runtime.registry import Registry

    yield "ok", adapter_memory(found.capacity) or "There is no slot for adapters."
    most, free = config.lora.max_loaded_loras, free_memory(torch.device("cpu"))
    if (on_host := most * found.capacity.slot_bytes) > free:
        yield (
            "warning",
            f"max_loaded_loras is {most}, and so many adapters may take {on_host / GIGABYTE:.1f} GB of host memory; "
            f"{free / GIGABYTE:.1f} GB are free.",
        )
    registry = Registry("", "")
    refused = [f"'{entry.name}': {why}" for entry in entries if (why := found.check(registry.add(entry)))]
    yield "ok", f"{len(entries) - len(refused)} of {len(entries)} adapters can be served from the start."
    yield from (("error", f"The server would refuse requests for {one}") for one in refused)


def _kernel_cache() -> tuple[Level, str]:
    """Triton keeps kernels there; without it every start compiles them, or fails."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(there, os.W_OK | os.X_OK):
        return "ok", f"Compiled kernels are kept in {folder}."
    return "error", f"Compiled kernels cannot be kept in {folder}: give TRITON_CACHE_DIR a folder that can be written."
