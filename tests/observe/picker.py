"""The endpoint picker as its documents tell: what it reads of a pod's metrics, and how it scores pods for an adapter.

The rules are those of the model server protocol of the Gateway API Inference Extension and of its scorer of adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.observe.scraped import Scrape


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod as the picker knows it."""

    waiting: int
    running: int
    kv_usage: float
    block_size: int
    blocks: int
    most_adapters: int
    active: frozenset[str]
    queued: frozenset[str]

    @classmethod
    def read(cls, text: str) -> Pod:
        """The picker asks for no labels; of several series about adapters it takes the one with the latest value."""
        scrape = Scrape(text)
        info = max(scrape.families["vllm:lora_requests_info"].samples, key=lambda sample: sample.value).labels
        [cache] = scrape.families["vllm:cache_config_info"].samples
        assert {scrape.families[name].type for name in scrape.families if name.startswith("vllm:")} == {"gauge"}
        return cls(
            waiting=int(_only(scrape, "vllm:num_requests_waiting")),
            running=int(_only(scrape, "vllm:num_requests_running")),
            kv_usage=_only(scrape, "vllm:kv_cache_usage_perc"),
            block_size=int(cache.labels["block_size"]),
            blocks=int(cache.labels["num_gpu_blocks"]),
            most_adapters=int(info["max_lora"]),
            active=_names(info["running_lora_adapters"]),
            queued=_names(info["waiting_lora_adapters"]),
        )

    def score(self, adapter: str) -> float:
        if adapter in self.active:
            return 1.0
        if len(self.active) + len(self.queued) < self.most_adapters:
            return 0.8
        return 0.6 if adapter in self.queued else 0.0


def picked(pods: Mapping[str, Pod], adapter: str) -> set[str]:
    """The pods with the best score; among these the picker is free to choose."""
    best = max(pod.score(adapter) for pod in pods.values())
    return {name for name, pod in pods.items() if pod.score(adapter) == best}


def _only(scrape: Scrape, name: str) -> float:
    [sample] = scrape.families[name].samples
    assert not sample.labels, "the picker takes a sample of any labels, so there is one without"
    return float(sample.value)


def _names(listed: str) -> frozenset[str]:
    return frozenset(name for part in listed.split(",") if (name := part.strip()))
