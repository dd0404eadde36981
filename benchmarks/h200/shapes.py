"""Shapes are the models we measure with: Llama-3.1-8B's for a GPU, and a tiny one to try the scripts on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rota.workload.scenario import Client, HeavyTail, Lengths, Scenario

RANK = 16
ADAPTERS = 16
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's config, and how far workloads are cut down for it."""

    name: str
    config: dict[str, Any]
    fewer: int = 1  # requests and open ones are divided by this, and come that much faster
    shorter: int = 1  # lengths are divided by this

    def fit(self, scenario: Scenario) -> Scenario:
        """The scenario as this model can serve it in reasonable time."""
        return replace(
            scenario,
            clients=tuple(map(self._fit, scenario.clients)),
            transients=-(-scenario.transients // self.fewer),
            transient_every_s=scenario.transient_every_s / self.fewer,
        )

    def _fit(self, client: Client) -> Client:
        concurrency = client.concurrency and max(2, client.concurrency // self.fewer)
        return replace(
            client,
            requests=max(min(client.requests, 4), client.requests // self.fewer),
            rate_per_s=client.rate_per_s and client.rate_per_s * self.fewer,
            concurrency=concurrency,
            prompt_tokens=self._fit_lengths(client.prompt_tokens),
            output_tokens=self._fit_lengths(client.output_tokens),
            cancel_within_s=client.cancel_within_s / self.fewer,
        )

    def _fit_lengths(self, lengths: Lengths) -> Lengths:
        if isinstance(lengths, HeavyTail):
            median = max(1.0, lengths.median / self.shorter)
            return HeavyTail(median=median, p99=median * lengths.p99 / lengths.median)
        low, high = lengths
        return max(1, low // self.shorter), max(1, high // self.shorter)


SHAPES = {shape.name: shape for shape in (Shape("llama-8b", LLAMA_8B), Shape("tiny", TINY, fewer=20, shorter=32))}
