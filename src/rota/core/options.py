"""An option is a config field by name, whether it comes as a flag, from a file or as an argument."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rota.core.errors import ConfigError

Config = TypeVar("Config")

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field of a config dataclass, as an operator sees it."""

    name: str
    kind: type
    choices: tuple[Any, ...]
    default: Any
    help: str
    words: tuple[str, ...] = ()  # that may stand for a value, such as 'auto'
    is_list: bool = False

    def check(self, value: Any) -> Any:
        """The value in the form that the config takes; raises ConfigError for a wrong value."""
        if (value is None and self.default is None) or (type(value) is str and value in self.words):
            return value
        if self.is_list:
            if not isinstance(value, list | tuple):
                raise ConfigError(f"{self.name} must be a list, not {value!r}.")
            return tuple(map(self._check_one, value))
        return self._check_one(value)

    def _check_one(self, value: Any) -> Any:
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            kinds = " or ".join([_KINDS[self.kind], *map(repr, self.words)])
            raise ConfigError(f"{self.name} must be {kinds}, not {value!r}.")
        if self.choices and value not in self.choices:
            listed = ", ".join(map(str, self.choices))
            raise ConfigError(f"{self.name} must be one of {listed}, not {value!r}.")
        return value


def option(default: Any, help: str) -> Any:
    """A field that is also a flag: `--field-name`, with `help` as its sentence."""
    return field(default=default, metadata={"help": help})


def options_of(*configs: type) -> dict[str, Option]:
    """Every option of these config dataclasses, by name."""
    found = {}
    for config in configs:
        hints = get_type_hints(config)
        for one in fields(config):
            found[one.name] = _option_of(one, hints[one.name])
    return found


def build(config: type[Config], given: Mapping[str, Any]) -> Config:
    """A config from the given options; options of other configs are left out."""
    own = options_of(config)
    return config(**{name: own[name].check(value) for name, value in given.items() if name in own})


def as_url(typed: str) -> str:
    """An address without a scheme is one of HTTP."""
    return typed if "://" in typed else f"http://{typed}"


def refuse_unknown(given: Mapping[str, Any], *configs: type) -> None:
    """Raise ConfigError for a name that is no option of any of these configs."""
    known = options_of(*configs)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}."
            raise ConfigError(f"{name} is not an option; {advice}")


def at_least(low: int, config: object, *names: str) -> None:
    refuse_unless(lambda value: value >= low, f"be at least {low}", config, *names)


def above_0(config: object, *names: str) -> None:
    refuse_unless(lambda value: 0.0 < value < math.inf, "be a finite number above 0", config, *names)


def refuse_unless(holds: Callable[[float], bool], what: str, config: object, *names: str) -> None:
    """Raises ConfigError for the first field that is a number, and not such a one; None and 'auto' are none."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, int | float) and not holds(value):
            raise ConfigError(f"{name} must {what}, not {value}.")


def _option_of(one: Field[Any], hint: Any) -> Option:
    """Reads a field's type: `int`, `int | None`, `int | Literal["auto"]`, `Literal["a", "b"]`, `tuple[int, ...]`."""
    is_list = get_origin(hint) is tuple
    kinds = [hint]
    if is_list or get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind not in (type(None), ...)]
    first, *others = kinds
    choices = get_args(first) if get_origin(first) is Literal else ()
    kind = type(choices[0]) if choices else first
    assert kind in _KINDS, f"a config field cannot be {hint}"
    words = tuple(word for other in others for word in get_args(other))
    return Option(
        name=one.name,
        kind=kind,
        choices=choices,
        default=one.default,
        help=one.metadata["help"],
        words=words,
        is_list=is_list,
    )
