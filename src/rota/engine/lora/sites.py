"""Sites are where a model lets adapters in: each layer has the same four, and PEFT has names for their parts."""

from __future__ import annotations

from rota.engine.lora.layout import SITES, SiteShape
from rota.engine.model.spec import ModelSpec

# Where a layer keeps each of the seven matrices.
HOMES = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}


def site_shapes(spec: ModelSpec) -> tuple[SiteShape, ...]:
    """The sites of each layer, in the order of SITES."""
    hidden, width = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes = (
        SiteShape("qkv", hidden, (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))),
        SiteShape("o", queries, (("o_proj", hidden),)),
        SiteShape("gate_up", hidden, (("gate_proj", width), ("up_proj", width))),
        SiteShape("down", width, (("down_proj", hidden),)),
    )
    assert tuple(shape.name for shape in shapes) == SITES
    return shapes


def module_name(layer: int, part: str) -> str:
    """What transformers, and so PEFT, calls a part of a layer."""
    return f"model.layers.{layer}.{HOMES[part]}.{part}"


def module_names(layers: int) -> list[str]:
    """Every module of a model that an adapter may change."""
    return [module_name(layer, part) for layer in range(layers) for part in HOMES]
