"""Checks of an embedding or a head of an adapter's own: PEFT's modules_to_save."""

from __future__ import annotations

from collections.abc import Iterator

from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.names import EMBEDDING, HEAD
from rota.engine.model.spec import ModelSpec


def own_matrices(folder: AdapterFolder, spec: ModelSpec) -> Iterator[str]:
    """A matrix is there if the config names it, and only then; it has a row for each token of the model."""
    config = folder.config
    for module, stored in folder.matrices.items():
        is_tied = config.is_tying and module == HEAD and EMBEDDING in config.own_modules
        if module not in config.own_modules and not is_tied:
            yield (
                f"{stored.file.path} holds the tensor '{stored.name}', a whole matrix, but {config.path.name} does not "
                "name it in 'modules_to_save'."
            )
        if stored.shape != (spec.vocab_size, spec.hidden_size):
            yield (
                f"{stored.file.path}: the tensor '{stored.name}' has the shape {list(stored.shape)}, but this model "
                f"has {spec.vocab_size} tokens and a hidden size of {spec.hidden_size}; an adapter with another "
                "vocabulary is served with a base model of that vocabulary alone."
            )
        if module in folder.tokens or (folder.tokens and spec.has_tied_embeddings):
            yield f"{config.path} has both 'modules_to_save' and 'trainable_token_indices' for '{module}'."
        if module in folder.factors:
            yield f"{folder.path} has factors for '{module}', and a whole matrix in its place."
    for module in config.own_modules:
        if module not in folder.matrices:
            yield f"{folder.path} lacks the weight of '{module}', which {config.path.name} names in 'modules_to_save'."


def room_for_matrices(folder: AdapterFolder, places: int, matrix_bytes: int) -> Iterator[str]:
    """The number is in the sentence: one such matrix is larger than all else of most adapters."""
    needed = len(folder.matrices)
    if needed > places:
        yield (
            f"{folder.config.path} sets 'modules_to_save': the adapter needs {needed * matrix_bytes:,} bytes on the "
            f"device for {' and '.join(sorted(folder.matrices))}, and this server has {places * matrix_bytes:,} for "
            "such matrices; start the server with this adapter among its --lora-paths, and if it has no room then, "
            "with a larger --lora-memory-share."
        )
