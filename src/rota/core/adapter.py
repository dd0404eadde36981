"""An adapter: a fine-tune of the base model that requests can ask for."""

from __future__ import annotations

from dataclasses import dataclass

from rota.core.errors import ConfigError
from rota.core.ids import AdapterId

# Names in metrics, logs and tables: the base model, and all adapters without metrics of their own.
BASE_LABEL = "base"
OTHER_LABEL = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What was loaded under a name. A name that is loaded again gets a new id, so old KV is never taken for new."""

    adapter_id: AdapterId
    name: str
    path: str
    weight: float = 1.0  # its share of slot time relative to others
    is_pinned: bool = False
    is_builtin: bool = False  # it comes with Rota, so it need not lie in the adapter root
    root: str | None = None  # the folder of its key, which it must not leave; None: the server's adapter root
    owner: str | None = None  # the name of the key that loaded it; None: the operator, at the start

    def __post_init__(self) -> None:
        if not self.weight > 0.0:
            raise ConfigError(f"weight of adapter '{self.name}' must be above 0, not {self.weight}.")
