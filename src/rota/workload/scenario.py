"""A scenario is a TOML file that says which clients ask what, and when."""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from rota.core.errors import ConfigError
from rota.core.options import above_0, refuse_unless
from rota.core.tenant import SOLE_TENANT, Tenant

# Which adapter the next request asks for. `uniform`: any. `zipf`: in proportion to 1/rank^exponent. `skewed`: each
# adapter `skew` times as often as the next one. `distinct`: one after the other.
Distribution = Literal["uniform", "zipf", "skewed", "distinct"]

Kind = TypeVar("Kind")

_KINDS = {int: "a whole number", float: "a number", str: "a text"}
# What a server knows only by its keys or by its model, so that no client can ask for it over HTTP.
_ONLY_SIMULATED = ("priority", "max_tokens", "grammar_share")


# ── lengths ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Lengths of prompts and answers are uniform between two numbers, or have a heavy tail.

MOST_TOKENS = 1_000_000
Z_P99 = 2.3263  # 99 of 100 draws from a normal distribution lie below so many standard deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyTail:
    """Lengths whose logarithm is drawn from a normal distribution: many are short, and a few very long."""

    median: float
    p99: float

    def __post_init__(self) -> None:
        if not 1.0 <= self.median < self.p99 <= MOST_TOKENS:
            limits = f"1 <= median < p99 <= {MOST_TOKENS}"
            raise ConfigError(f"median and p99 must be tokens with {limits}, not {self.median:g} and {self.p99:g}.")

    @property
    def longest(self) -> int:
        """As many times P99 as P99 is the median: of a million lengths two would be longer, and are cut to this."""
        return min(MOST_TOKENS, math.ceil(self.p99 * self.p99 / self.median))

    def draw(self, dice: random.Random) -> int:
        length = dice.lognormvariate(math.log(self.median), math.log(self.p99 / self.median) / Z_P99)
        return min(max(1, round(length)), self.longest)


Lengths = tuple[int, int] | HeavyTail  # two numbers: the lowest and the highest


def _longest(lengths: Lengths) -> int:
    return lengths.longest if isinstance(lengths, HeavyTail) else lengths[1]


# ── scenario ────────────────────────────────────────────────────────────────────────────────────────────────────────
# A scenario has clients and a server; its file is TOML.

_LISTS: dict[Any, tuple[type, str]] = {
    tuple[float, ...]: (float, "a list of numbers"),
    tuple[int, ...]: (int, "a list of whole numbers"),
    Lengths: (int, "two whole numbers, [low, high], or a table with median and p99"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A source of requests: an open loop at a rate, or a closed loop with a fixed number of open requests."""

    requests: int
    rate_per_s: float | None = None
    concurrency: int | None = None
    prompt_tokens: Lengths = (1, 512)
    output_tokens: Lengths = (1, 512)
    adapters: int = 0  # requests name this many adapters; 0: only the base model
    first_adapter: int = 1  # the lowest number among them
    distribution: Distribution = "uniform"
    zipf_exponent: float = 1.1
    skew: float = 1.5
    base_share: float = 0.0
    cancel_share: float = 0.0  # share of requests whose client leaves at a random moment
    cancel_within_s: float = 10.0
    burst: int = 1  # requests come this many at a time; the rate still counts requests
    priority: int = 0  # of the requests, on top of the tenant's
    shared_prefix_tokens: int = 0  # the first tokens of its prompts are the same
    # The limit that its requests name. The answer is as long as `output_tokens` says and then stops by itself; left
    # out: the limit is the length of the answer.
    max_tokens: int | None = None
    grammar_share: float = 0.0  # share of requests whose answers follow a grammar
    tenant: str = ""  # the tenant that sends the requests; "*": every adapter has a tenant of its own
    starts_after_s: float = 0.0

    def __post_init__(self) -> None:
        if (self.rate_per_s is None) == (self.concurrency is None):
            raise ConfigError("A client needs either rate_per_s or concurrency, and not both.")
        if self.distribution not in get_args(Distribution):
            raise ConfigError(
                f"distribution must be one of {', '.join(get_args(Distribution))}, not {self.distribution!r}."
            )
        for name in ("prompt_tokens", "output_tokens"):
            lengths = getattr(self, name)
            if not isinstance(lengths, HeavyTail) and not 1 <= lengths[0] <= lengths[1]:
                raise ConfigError(f"{name} must be [low, high] with 1 <= low <= high, not {list(lengths)}.")
        _check_least(
            self,
            requests=0,
            concurrency=1,
            adapters=0,
            first_adapter=1,
            zipf_exponent=0,
            cancel_within_s=0,
            starts_after_s=0,
            burst=1,
            shared_prefix_tokens=0,
            max_tokens=1,
        )
        above_0(self, "skew")
        refuse_unless(lambda value: value > 0.0, "be above 0", self, "rate_per_s")
        if self.burst > 1 and self.rate_per_s is None:
            raise ConfigError("burst needs rate_per_s: in a closed loop a request comes when an answer ends.")
        shares = ("base_share", "cancel_share", "grammar_share")
        refuse_unless(lambda value: 0.0 <= value <= 1.0, "be between 0 and 1", self, *shares)

    @property
    def longest(self) -> int:
        """Tokens of its longest possible request, with the answer."""
        return _longest(self.prompt_tokens) + (self.max_tokens or _longest(self.output_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Clients that ask at the same time, and the resources of the server."""

    name: str
    about: str = ""
    slots: int = 0
    max_running_requests: int = 256
    kv_blocks: int = 16_384
    context_length: int | None = None  # left out: long enough for every request
    max_loaded_loras: int | None = None  # adapters in host memory; left out: the server's default
    fetch_s: float | None = None  # how long an adapter's read from disk takes; left out: what the cost model says
    weights: tuple[float, ...] = ()  # of adapter 1, adapter 2 and so on; further adapters have the weight 1
    pages: int = 0  # of eight ranks, that the slots share; 0: every slot holds any adapter
    adapter_pages: tuple[int, ...] = ()  # that adapter 1, adapter 2 and so on take; further ones from the first again
    clients: tuple[Client, ...] = field(default_factory=tuple)
    transients: int = 0  # adapters that are loaded, asked and unloaded during the run
    transient_every_s: float = 2.0
    transient_stays_s: float | None = None  # from its loading to its unloading; left out: half of `transient_every_s`
    transient_requests: int = 1  # of each, spread over its stay
    tenants: tuple[Tenant, ...] = ()  # a tenant that is not here has the weight 1 and no limit

    def __post_init__(self) -> None:
        _check_least(
            self,
            slots=0,
            max_running_requests=1,
            kv_blocks=2,
            context_length=2,
            max_loaded_loras=1,
            fetch_s=0,
            transients=0,
            transient_stays_s=0,
            transient_requests=1,
            pages=0,
        )
        above_0(self, "transient_every_s")
        if bool(self.pages) != bool(self.adapter_pages) or not all(0 < one <= self.pages for one in self.adapter_pages):
            raise ConfigError(
                f"adapter_pages must be whole numbers of at least 1 and at most pages ({self.pages}), and neither is "
                f"given without the other; not {list(self.adapter_pages)}."
            )
        if len(self.weights) > self.adapters or not all(0.0 < weight < math.inf for weight in self.weights):
            raise ConfigError(
                f"weights must be finite numbers above 0, one for each of at most {self.adapters} adapters, "
                f"not {list(self.weights)}."
            )
        if self.transients and not self.adapters:
            raise ConfigError("transients are copies of adapters, and no client asks for one.")
        named = {client.tenant for client in self.clients}
        if "*" in named:
            return
        for tenant in self.tenants:
            if tenant.name not in named:
                raise ConfigError(f"no client has the tenant '{tenant.name}'; those of clients are {sorted(named)}.")

    @property
    def adapters(self) -> int:
        return max(
            (client.first_adapter + client.adapters - 1 for client in self.clients if client.adapters), default=0
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest possible request, with its answer."""
        return max((client.longest for client in self.clients), default=0)

    def weight_of(self, adapter: int) -> float:
        return self.weights[adapter - 1] if adapter <= len(self.weights) else 1.0

    def pages_of(self, adapter: int) -> int:
        """How many pages an adapter takes; 0 if slots share none."""
        return self.adapter_pages[(adapter - 1) % len(self.adapter_pages)] if self.adapter_pages else 0

    @property
    def has_shared_prefixes(self) -> bool:
        return any(client.shared_prefix_tokens for client in self.clients)

    @property
    def only_simulated(self) -> list[str]:
        """The fields in use that a client cannot ask of a server over HTTP."""
        found = [name for name in _ONLY_SIMULATED if any(getattr(client, name) for client in self.clients)]
        return found + (["transient_requests"] if self.transient_requests > 1 else [])

    def tenant_of(self, client: Client, adapter: str) -> Tenant:
        name = adapter if client.tenant == "*" else client.tenant
        if not name:
            return SOLE_TENANT
        return next((one for one in self.tenants if one.name == name), Tenant(name=name))


def read_scenario(path: Path) -> Scenario:
    """Read a scenario file; unknown names and values of a wrong type are errors."""
    table = _read_table(path)
    listed = table.pop("clients", [])
    if not isinstance(listed, list) or not all(isinstance(client, dict) for client in listed):
        raise ConfigError(f"{path}: clients must be tables: write [[clients]] above the fields of each.")
    if not listed:
        raise ConfigError(f"{path} has no [[clients]], so there would be no requests.")
    clients = tuple(_build(Client, client, f"{path}, client {number}") for number, client in enumerate(listed, start=1))
    tenants = _tenants(table.pop("tenants", {}), path)
    return _build(Scenario, {"name": path.stem, **table}, str(path), clients=clients, tenants=tenants)


def _tenants(tables: Any, path: Path) -> tuple[Tenant, ...]:
    if not isinstance(tables, dict) or not all(isinstance(one, dict) for one in tables.values()):
        raise ConfigError(f"{path}: tenants must be tables: write [tenants.NAME] above the fields of each.")
    return tuple(_build(Tenant, one, f"{path}, tenant '{name}'", name=name) for name, one in tables.items())


def _read_table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no scenario file {path}.") from None
    except OSError as error:
        raise ConfigError(f"Cannot read the scenario {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.") from None


def _build(kind: type[Kind], table: Mapping[str, Any], place: str, **made: Any) -> Kind:
    """One dataclass from a table of a file; errors name the place in the file."""
    hints = get_type_hints(kind)
    known = {one.name: one for one in fields(kind) if one.name not in made}  # type: ignore[arg-type]
    try:
        for name in table:
            if name not in known:
                raise ConfigError(f"'{name}' is not a field of {kind.__name__.lower()}; known are {sorted(known)}.")
        for name, one in known.items():
            if name not in table and one.default is MISSING and one.default_factory is MISSING:
                raise ConfigError(f"'{name}' is missing.")
        return kind(**{name: _fitting(name, value, hints[name]) for name, value in table.items()}, **made)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _fitting(name: str, value: Any, hint: Any) -> Any:
    """The value in the form that its field takes; raises ConfigError for a value of a wrong type."""
    if hint == Lengths and isinstance(value, dict) and value.keys() == {"median", "p99"}:
        return _build(HeavyTail, value, name)
    if hint in _LISTS:
        each, wanted = _LISTS[hint]
        is_fitting = isinstance(value, list) and all(type(one) in (int, each) for one in value)
        if not is_fitting or (hint == Lengths and len(value) != 2):
            raise ConfigError(f"{name} must be {wanted}, not {value!r}.")
        return tuple(map(each, value))
    kind = get_args(hint)[0] if isinstance(hint, UnionType) else hint
    if get_origin(kind) is Literal:
        kind = str
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ConfigError(f"{name} must be {_KINDS[kind]}, not {value!r}.")
    return value


def _check_least(owner: object, **least: int) -> None:
    for name, low in least.items():
        value = getattr(owner, name)
        if value is not None and not low <= value < math.inf:
            raise ConfigError(f"{name} must be finite and at least {low}, not {value}.")
