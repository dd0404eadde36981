"""Flags are made from config dataclasses: a field is a flag, and a name in a config file."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import typer
import typer.core

from rota.core.errors import ConfigError
from rota.core.options import Option, option, options_of, refuse_unknown
from rota.core.version import how_to_install

# ── outputs ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A command checks its output files before its work.


def check_outputs(files: Iterable[str | None], plot: str | None) -> None:
    """Raises ConfigError if a file's folder is missing, or matplotlib for a plot. None means no file."""
    for path in filter(None, (*files, plot)):
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"There is no folder {Path(path).parent} to write {Path(path).name} into.")
    if plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--plot needs matplotlib ({error}): {how_to_install('plot')}.") from error


Act = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class QuietConfig:
    """The option of every command with long work."""

    quiet: bool = option(False, "Show no progress.")


def make_command(act: Act, sentence: str, options: Iterable[Option], *others: inspect.Parameter) -> Callable[..., None]:
    """A function with a parameter per option, because typer makes flags of parameters. `act` gets what was typed."""
    known = {option.name: option for option in options}

    def command(context: typer.Context, **values: Any) -> None:
        given = {name: value for name, value in values.items() if _is_given(context, name)}
        checked = {name: known[name].check(_plain(known[name], given[name])) for name in given if name in known}
        act(given | checked)

    parameters = [parameter("context", typer.Context), *others, *map(flag, known.values())]
    command.__doc__ = sentence
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def grouped_help(groups: Mapping[str, Sequence[str]]) -> type[typer.core.TyperCommand]:
    """A command whose --help shows the options of these groups alone; `help_all` shows every option."""

    class GroupedCommand(typer.core.TyperCommand):
        def format_options(self, ctx: Any, formatter: Any) -> None:
            records = {one.name: record for one in self.get_params(ctx) if (record := one.get_help_record(ctx))}
            if ctx.meta.get(HELP_ALL):
                groups_shown = {"Options": list(records.values())}
            else:
                groups_shown = {title: [records[name] for name in names] for title, names in groups.items()}
                groups_shown["Others"] = [records[name] for name in ("config", "quiet", "help_all", "help")]
            for title, shown in groups_shown.items():
                with formatter.section(title):
                    formatter.write_dl(shown)

    return GroupedCommand


HELP_ALL = "rota.help_all"


def help_all() -> inspect.Parameter:
    """`--help-all`, for a command of `grouped_help`."""

    def show(context: typer.Context, is_asked: bool) -> None:
        if is_asked:
            context.meta[HELP_ALL] = True
            typer.echo(context.get_help())
            raise typer.Exit

    sentence = "Show every option and end."
    return parameter("help_all", bool, typer.Option(False, "--help-all", help=sentence, callback=show, is_eager=True))


def flag(option: Option) -> inspect.Parameter:
    name = f"--{option.name.replace('_', '-')}"
    if option.kind is bool:
        return parameter(option.name, bool, typer.Option(option.default, f"{name}/--no-{name[2:]}", help=option.help))
    if option.choices:
        choices = Enum(option.name, {str(choice): str(choice) for choice in option.choices})  # type: ignore[misc]
        return parameter(option.name, choices, typer.Option(choices(str(option.default)), name, help=option.help))
    if option.is_list:
        default = typer.Option(option.default, name, help=option.help, metavar=f"<{option.kind.__name__}>")
        return parameter(option.name, list[option.kind], default)  # type: ignore[name-defined]
    if option.words:
        default = typer.Option(
            option.default, name, help=option.help, parser=_reader(option), metavar=f"<{_values(option)}>"
        )
        return parameter(option.name, str, default)
    return parameter(option.name, option.kind | None, typer.Option(option.default, name, help=option.help))


def parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def config_file() -> inspect.Parameter:
    """`--config FILE`. `with_file` reads the file."""
    sentence = "A TOML file that sets any of these options. A flag overrides the file."
    return parameter("config", Path | None, typer.Option(None, metavar="FILE", help=sentence))


def quiet_flag(sentence: str = options_of(QuietConfig)["quiet"].help) -> inspect.Parameter:
    return parameter("quiet", bool, typer.Option(False, "--quiet", "--disable-tqdm", help=sentence))


def spread_lists(arguments: list[str], options: Iterable[Option]) -> list[str]:
    """Let `--lora-paths a b` mean `--lora-paths a --lora-paths b`, as operators expect."""
    spread: list[str] = []
    for flag_before, argument in _followed(arguments, options):
        spread += [flag_before, argument] if flag_before else [argument]
    return spread


def followers_in(arguments: list[str], options: Iterable[Option]) -> list[str]:
    """The values without a flag of their own that `spread_lists` takes for another value of a list."""
    return [argument for flag_before, argument in _followed(arguments, options) if flag_before]


def _followed(arguments: list[str], options: Iterable[Option]) -> Iterator[tuple[str | None, str]]:
    """Every argument, with the list flag before it if that flag already has a value."""
    lists = {f"--{option.name.replace('_', '-')}" for option in options if option.is_list}
    current, has_value = None, False
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, _ = argument.partition("=")
            current, has_value = name if name in lists else None, bool(equals)
            yield None, argument
        else:
            yield current if has_value else None, argument
            has_value = True


def with_file(given: dict[str, Any], *configs: type) -> dict[str, Any]:
    """The options that were typed. The others come from the file of `--config`."""
    typed = {name: value for name, value in given.items() if name != "config"}
    return (read_config_file(given["config"], *configs, QuietConfig) if "config" in given else {}) | typed


def read_config_file(path: Path, *configs: type) -> dict[str, Any]:
    """Options by name from a TOML file. Dashes and underscores are the same."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.") from error
    given = {name.replace("-", "_"): value for name, value in content.items()}
    try:
        refuse_unknown(given, *configs)
        known = options_of(*configs)
        return {name: known[name].check(value) for name, value in given.items()}
    except ConfigError as error:
        raise ConfigError(f"In {path}: {error}") from None


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether a value was typed and is not the default. Typed values override those of a file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _plain(option: Option, value: Any) -> Any:
    return option.kind(value.value) if isinstance(value, Enum) else value


def _reader(option: Option) -> Callable[[str], Any]:
    """Reads a number, or a word that the option takes in its place."""

    def read(text: str) -> Any:
        try:
            return text if text in option.words else option.kind(text)
        except ValueError:
            raise typer.BadParameter(f"'{text}' is not {_values(option)}.") from None

    return read


def _values(option: Option) -> str:
    return "|".join([option.kind.__name__, *option.words])
