"""Sources are places besides folders from which adapters come, with a cache on disk before them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rota.core.errors import ConfigError
from rota.core.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """Where adapters of sources are kept."""

    adapter_cache_dir: str | None = option(
        None,
        "The folder that keeps adapters of s3://, gs://, az:// and hf:// on disk; left out: rota/adapters in "
        "XDG_CACHE_HOME, or in ~/.cache.",
    )
    adapter_cache_gb: float = option(
        20.0, "Largest size of that folder in GB; the adapters that were read longest ago leave first."
    )

    lora_resolver: str | None = option(
        None,
        "A folder or an address. A request for a NAME that is not loaded loads the adapter at NAME below it first. "
        "Left out: such a request is refused.",
    )

    def __post_init__(self) -> None:
        if not 0.0 < self.adapter_cache_gb < math.inf:
            raise ConfigError(f"adapter_cache_gb must be a finite number above 0, not {self.adapter_cache_gb}.")
