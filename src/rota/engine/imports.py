"""An engine's imports, ahead of its building: none of them touches a GPU."""

from __future__ import annotations

from importlib import import_module

# Modules with kernels for a GPU. An engine imports those that it chooses. FlashInfer is not among them: its import may
# ask for a GPU.
ON_GPU = (
    "rota.engine.attention.triton_attention",
    "rota.engine.lora.triton_ops",
    "rota.engine.lora.triton_embed_head",
    "rota.engine.ops.fused",
    "rota.engine.quantised.packed_product",
    "rota.engine.quantised.scaled_product",
    "rota.engine.sampling.triton_sampling",
)


def import_engine(device: str | None) -> None:
    """All that an engine on such a device may need: PyTorch takes most of the time, and Triton the next."""
    import_module("rota.engine.build")
    if device == "cuda":
        for name in ON_GPU:
            import_module(name)
