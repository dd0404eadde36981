"""Checks of factors at the model's ends: the embedding and the head."""

from __future__ import annotations

from collections.abc import Iterator

from rota.core.extras import Extra
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.names import EMBEDDING, ENDS, HEAD
from rota.engine.model.spec import ModelSpec

EXTRAS = {EMBEDDING: Extra.EMBEDDING, HEAD: Extra.HEAD}


def room_for_ends(folder: AdapterFolder, extras: Extra) -> Iterator[str]:
    """The bank must have this end, and no trims are computed there."""
    config = folder.config
    for module in ENDS:
        if module not in folder.factors:
            continue
        if config.is_dora or config.has_factor_biases:
            field = "use_dora" if config.is_dora else "lora_bias"
            yield f"{config.path} sets '{field}' and has factors for '{module}', where Rota serves plain factors alone."
        elif EXTRAS[module] not in extras:
            yield (
                f"{config.path} has factors for '{module}', for which this server's slots have no room; start the "
                "server with this adapter among its --lora-paths."
            )


def shapes_of_ends(folder: AdapterFolder, spec: ModelSpec) -> Iterator[str]:
    tokens, hidden = spec.vocab_size, spec.hidden_size
    for module, inputs, outputs in ((EMBEDDING, tokens, hidden), (HEAD, hidden, tokens)):
        factors = folder.factors.get(module)
        if factors is None:
            continue
        for stored, shape in (
            (factors.a, (folder.config.rank_of(module), inputs)),
            (factors.b, (outputs, folder.config.rank_of(module))),
            (factors.base, (tokens, hidden)),
        ):
            if stored is not None and stored.shape != shape:
                yield (
                    f"{stored.file.path}: the tensor '{stored.name}' has the shape {list(stored.shape)}, but this "
                    f"model's {module} has {tokens} tokens and a hidden size of {hidden}; the adapter was made for "
                    "another model, or for more tokens."
                )
