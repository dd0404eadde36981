"""An adapter: a fine-tune of the base model that requests can ask for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag

from rota.core.errors import ConfigError
from rota.core.ids import AdapterId
from rota.core.lora_paths import LoraPath

# ── extras ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Extras are what some adapters have besides factors in the layers; a bank has room for those of its first adapters.


class Extra(IntFlag):
    """As a number it travels with the engine's config."""

    NONE = 0
    GAIN_BIAS = 1  # a gain and a shift for each output of a site: DoRA and biases
    EMBEDDING = 2  # factors of the embedding
    HEAD = 4  # factors of the head


# Names in metrics, logs and tables: the base model, and all adapters without metrics of their own.
BASE_LABEL = "base"
OTHER_LABEL = "other"
# Of names in a sentence; there may be thousands.
MOST_LISTED = 50
MAX_VERSION_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(LoraPath):
    """One version of what was loaded under a name. Each has an id of its own, so old KV is never taken for new."""

    adapter_id: AdapterId
    version: int = 1  # counts what was loaded under the name
    # By rank: digests of what its first read found, which every later read must find again. Empty: it was not read yet.
    seals: tuple[str, ...] = ()
    is_read_alone: bool = False  # an engine died while it was read, so no other adapter is read beside it

    def __post_init__(self) -> None:
        if not self.weight > 0.0:
            raise ConfigError(f"weight of adapter '{self.name}' must be above 0, not {self.weight}.")

    @property
    def is_far(self) -> bool:
        """Whether it lies in a source, and not in a folder."""
        return "://" in self.path

    @property
    def label(self) -> str:
        """How a client asks for this version and no other."""
        return f"{self.name}@{self.version}"


def changed_since(adapter: Adapter) -> str:
    """Why a version is not served whose files are others by now: its KV and its number would mean two things."""
    return f"'{adapter.name}' changed since version {adapter.version} was loaded; PUT it again."


def split_label(label: str) -> tuple[str, int] | None:
    """The name and the number in `name@version`; None for anything else."""
    name, at, digits = label.rpartition("@")
    is_number = bool(at) and digits.isascii() and digits.isdigit() and len(digits) <= MAX_VERSION_DIGITS
    return (name, int(digits)) if is_number else None


def listed(names: Iterable[str]) -> str:
    """Names for a sentence: all of them, or the first and how many more there are."""
    every = list(names)
    some = ", ".join(every[:MOST_LISTED]) or "none"
    return some if len(every) <= MOST_LISTED else f"{some} and {len(every) - MOST_LISTED:,} more"
