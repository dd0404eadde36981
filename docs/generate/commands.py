"""Commands and their flags, as the command line takes them and the config dataclasses explain them."""

from __future__ import annotations

from typing import Any

import typer

from docs.generate.tables import code, table
from rota.bench.config import BenchConfig
from rota.cli import make_app
from rota.commands.chat.command import ChatConfig
from rota.commands.demo import DemoConfig
from rota.commands.serve import SERVE_CONFIGS, serve_model
from rota.commands.simulate import SimulateConfig
from rota.core.options import Option, options_of

# What a command takes of its own; whatever else it takes is among the groups of `rota serve`.
OWN_CONFIGS: dict[str, tuple[type, ...]] = {
    "bench": (BenchConfig,),
    "simulate": (SimulateConfig,),
    "chat": (ChatConfig,),
    "demo": (DemoConfig,),
}
HEAD = ("flag", "default", "meaning")


def all_commands() -> dict[str, Any]:
    """Every command by what is typed after `rota`."""
    found: dict[str, Any] = {}
    for name, entry in typer.main.get_command(make_app(serve_model)).commands.items():  # type: ignore[attr-defined]
        parts = getattr(entry, "commands", {})
        found |= {f"{name} {part}": command for part, command in parts.items()} or {name: entry}
    return found


def command(*words: str) -> str:
    """One command: its sentence, what it takes of its own, and the groups of flags it shares or brings."""
    name = " ".join(words)
    shown = all_commands()[name]
    takes = [parameter for parameter in shown.params if parameter.name != "help"]
    groups = {config: options_of(config) for config in SERVE_CONFIGS if _is_used(name, options_of(config), takes)}
    shared = {option for group in groups.values() for option in group}
    own = options_of(*OWN_CONFIGS.get(name, ()))
    rows = [
        _option_row(own[one.name]) if one.name in own else _plain_row(one) for one in takes if one.name not in shared
    ]
    parts = [shown.help, table(HEAD, rows)]
    if name == "serve":
        parts += [_group(config, options) for config, options in groups.items()]
    elif groups:
        *links, last = [f"[{_title(config)}](#{_title(config).lower()})" for config in groups]
        listed = " and ".join(filter(None, (", ".join(links), last)))
        parts.append(f"It also takes the flags of `rota serve` under {listed}.")
    return "\n\n".join(parts)


def _is_used(name: str, options: dict[str, Option], takes: list[Any]) -> bool:
    """A group is taken whole or not at all; a command's own flag may have the name of one in a group."""
    names = {one.name for one in takes} - options_of(*OWN_CONFIGS.get(name, ())).keys()
    return options.keys() <= names


def _group(config: type, options: dict[str, Option]) -> str:
    return f"### {_title(config)}\n\n{config.__doc__}\n\n{table(HEAD, map(_option_row, options.values()))}"


def _title(config: type) -> str:
    return config.__name__.removesuffix("Config").replace("Lora", "LoRA")


def _option_row(option: Option) -> tuple[str, str, str]:
    flag = f"--{option.name.replace('_', '-')}"
    if option.kind is bool:
        return f"{code(flag)}, {code('--no-' + flag[2:])}", "on" if option.default else "off", option.help
    values = "|".join(map(str, option.choices)) or "|".join([f"<{option.kind.__name__}>", *option.words])
    return code(f"{flag} {values}"), _default(option), option.help


def _default(option: Option) -> str:
    values = option.default if option.is_list else () if option.default is None else (option.default,)
    return (
        code(" ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)) if values else ""
    )


def _plain_row(parameter: Any) -> tuple[str, str, str]:
    """A flag or argument that comes from no config."""
    if parameter.param_type_name == "argument":
        return code(parameter.metavar), "", parameter.help
    flags = ", ".join(code(f"{flag} {parameter.metavar or ''}".rstrip()) for flag in parameter.opts)
    return flags, code(parameter.default) if parameter.default else "", parameter.help
