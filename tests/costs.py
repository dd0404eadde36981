"""Cost models of tests: every step takes the same time."""

from __future__ import annotations

from rota.sim.cost import LinearCost


def constant_cost(
    seconds: float, load_s: float = 0.0, fetch_s: float = 0.0, front_s: float = 0.0, mask_s: float = 0.0
) -> LinearCost:
    return LinearCost(
        name="constant",
        base_s=seconds,
        prefill_s=0.0,
        lora_s=0.0,
        sequence_s=0.0,
        prompt_token_s=0.0,
        context_token_s=0.0,
        adapter_s=0.0,
        load_s=load_s,
        fetch_s=fetch_s,
        front_s=front_s,
        mask_s=mask_s,
    )
