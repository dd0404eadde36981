"""Showing says what the server tells of itself: metrics, traces, journals and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rota.core.errors import ConfigError
from rota.core.listen_config import ListenConfig
from rota.core.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowConfig(ListenConfig):
    """Metrics, traces, journals and logs of a server."""

    metrics_max_adapters: int = option(
        50, "Adapters with metrics of their own; further adapters count as 'other' while no place is free."
    )
    metrics_max_keys: int = option(
        50, "Keys with metrics of their own; further keys count as 'other' while no place is free."
    )
    picker_metrics: bool = option(
        True, "Also the totals that the endpoint picker of Kubernetes reads, under vLLM's names, in /metrics."
    )
    metrics_port: int | None = option(
        None, "A second port for /metrics and the health probes alone, without keys and TLS; 0 picks a free one."
    )
    metrics_host: str = option(
        "127.0.0.1", "The address of metrics_port; every client that reaches it sees the names of adapters and keys."
    )
    journal_dir: str | None = option(
        None, "A folder of journals (.jsonl) that the dashboard replays by name: /dashboard?journal=run.jsonl."
    )
    otel: bool = option(
        False,
        "Send a trace of every request to an OpenTelemetry collector, as the OTEL_* variables say; needs rota[otel].",
    )
    log_format: Literal["text", "json"] = option(
        "text", "How log lines on stderr look; with 'json' every line there is a JSON object, also a library's."
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "The lowest level that is logged; 'info' has a line for every request."
    )

    def __post_init__(self) -> None:
        ListenConfig.__post_init__(self)  # not super(): see ServerConfig
        for name in ("metrics_max_adapters", "metrics_max_keys"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{name} must be at least 0, not {value}.")
        if self.metrics_port and self.metrics_port == self.port:
            raise ConfigError(f"metrics_port and port are both {self.port}; give metrics_port another number.")
