"""Checks of factors at the model's ends: the embedding and the head."""

from __future__ import annotations

from collections.abc import Iterator

from rota.core.extras import Extra
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.names import EMBEDDING, ENDS, HEAD
from rota.engine.model.spec import ModelSpec

EXTRAS = {EMBEDDING: Extra.EMBEDDING, HEAD: Extra.HEAD}


def own_tokens(folder: AdapterFolder, spec: ModelSpec, max_rank: int | None) -> Iterator[str]:
    """Rows for tokens must be as many as the config names, and each of them takes a rank."""
    config = folder.config
    for module, stored in folder.tokens.items():
        if module not in config.own_tokens:
            yield (
                f"{stored.file.path} holds the tensor '{stored.name}', but {config.path.name} does not name its tokens "
                "in 'trainable_token_indices'."
            )
    for module, tokens in config.own_tokens.items():
        place = f"{config.path}: 'trainable_token_indices' names"
        if module not in folder.tokens:
            yield f"{place} {len(tokens)} tokens of '{module}', but {folder.path} has no rows for them."
        elif folder.tokens[module].shape != (len(tokens), spec.hidden_size):
            yield (
                f"{place} {len(tokens)} tokens of '{module}', but their rows have the shape "
                f"{list(folder.tokens[module].shape)}."
            )
        if max(tokens, default=0) >= spec.vocab_size:
            yield f"{place} token {max(tokens)}, but this model has {spec.vocab_size} tokens."
        if module in folder.factors:
            yield f"{place} tokens of '{module}', which has factors too; Rota serves one of both."
        if max_rank is not None and len(tokens) > max_rank:
            yield (
                f"{place} {len(tokens)} tokens of '{module}', and each takes a rank: over the limit of {max_rank} that "
                f"slots were made for; start the server with --max-lora-rank {len(tokens)}, or with this adapter among "
                "its --lora-paths."
            )


def room_for_ends(folder: AdapterFolder, extras: Extra) -> Iterator[str]:
    """The bank must have this end."""
    for module in ENDS:
        if (module in folder.factors or module in folder.tokens) and EXTRAS[module] not in extras:
            yield (
                f"{folder.config.path} has factors or tokens for '{module}', for which this server's slots have no "
                "room; start the server with this adapter among its --lora-paths."
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
            (factors.magnitude, (outputs,)),
            (factors.b_bias, (outputs,)),
        ):
            if stored is not None and stored.shape != shape:
                yield (
                    f"{stored.file.path}: the tensor '{stored.name}' has the shape {list(stored.shape)}, but this "
                    f"model's {module} has {tokens} tokens and a hidden size of {hidden}; the adapter was made for "
                    "another model, or for more tokens."
                )
