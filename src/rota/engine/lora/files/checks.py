"""Checks say why a model cannot serve an adapter, nearly all before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from rota.core.adapter import Adapter, Extra
from rota.core.errors import AdapterError
from rota.engine.lora.files.brought import Brought
from rota.engine.lora.files.folder import AdapterFolder, Factors, FolderFiles
from rota.engine.lora.files.outline import Inquire, answer
from rota.engine.lora.files.peft_config import EMBEDDING, END_MODULES, HEAD
from rota.engine.lora.files.reader import reason_for
from rota.engine.lora.files.tensor_file import StoredTensor
from rota.engine.lora.growth import SlotGrowth
from rota.engine.model.sites import PARENTS, module_name, module_names, site_shapes
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import BY_INPUTS
from rota.engine.weights.finite import is_finite

# ── end checks ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Checks of factors at the model's ends: the embedding and the head.

EXTRAS = {EMBEDDING: Extra.EMBEDDING, HEAD: Extra.HEAD}


def own_tokens(folder: AdapterFolder, spec: ModelSpec, max_rank: int | None) -> Iterator[str]:
    """Rows for tokens must be as many as the config names, and each of them takes a rank."""
    config = folder.config
    for module, stored in folder.tokens.items():
        if module not in config.own_tokens:
            yield f"{_holds(stored)}, but {config.path.name} does not name its tokens in 'trainable_token_indices'."
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


def room_for_embed_head(folder: AdapterFolder, extras: Extra) -> Iterator[str]:
    """The bank must have this end."""
    for module in END_MODULES:
        if (module in folder.factors or module in folder.tokens) and EXTRAS[module] not in extras:
            yield (
                f"{folder.config.path} has factors or tokens for '{module}', for which this server's slots have no "
                "room; start the server with this adapter among its --lora-paths."
            )


def shapes_of_embed_head(folder: AdapterFolder, spec: ModelSpec) -> Iterator[str]:
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
                    f"{_has_shape(stored)}, but this model's {module} has {tokens} tokens and a hidden size of "
                    f"{hidden}; the adapter was made for another model, or for more tokens."
                )


# ── matrix checks ───────────────────────────────────────────────────────────────────────────────────────────────────
# Checks of an embedding or a head of an adapter's own: PEFT's modules_to_save.


def own_matrices(folder: AdapterFolder, spec: ModelSpec) -> Iterator[str]:
    """A matrix is there if the config names it, and only then; it has a row for each token of the model."""
    config = folder.config
    for module, stored in folder.matrices.items():
        is_tied = config.is_tying and module == HEAD and EMBEDDING in config.own_modules
        if module not in config.own_modules and not is_tied:
            yield f"{_holds(stored)}, a whole matrix, but {config.path.name} does not name it in 'modules_to_save'."
        if stored.shape != (spec.vocab_size, spec.hidden_size):
            yield (
                f"{_has_shape(stored)}, but this model has {spec.vocab_size} tokens and a hidden size of "
                f"{spec.hidden_size}; an adapter with another vocabulary is served with a base model of that "
                "vocabulary alone."
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


# ── gain and bias checks ────────────────────────────────────────────────────────────────────────────────────────────
# Checks of what DoRA and biases bring besides factors: one vector for a module, as long as its outputs.


def vectors_of_factors(folder: AdapterFolder) -> Iterator[str]:
    """Every module with factors has the vectors that the config promises, and no others."""
    config = folder.config
    for module, factors in folder.factors.items():
        for field, is_set, stored, name in (
            ("use_dora", config.is_dora, factors.magnitude, "lora_magnitude_vector"),
            ("lora_bias", config.has_factor_biases, factors.b_bias, "lora_B.bias"),
        ):
            if is_set and stored is None:
                yield f"{folder.path} lacks the {name} of '{module}', though {config.path.name} sets '{field}'."
            elif stored is not None and not is_set:
                yield f"{_holds(stored)}, but {config.path.name} does not set '{field}'."


def room_for_gain_bias(folder: AdapterFolder, extras: Extra, ranks: int) -> Iterator[str]:
    """The bank must have gains and biases, and a rank that has only a part of a sum cannot know a row's norm."""
    config = folder.config
    needs_gain_bias = config.is_dora or config.has_factor_biases or bool(folder.biases)
    if needs_gain_bias and Extra.GAIN_BIAS not in extras:
        field = "use_dora" if config.is_dora else "lora_bias" if config.has_factor_biases else "bias"
        yield (
            f"{config.path} sets '{field}', for which this server's slots have no room; start the server with this "
            "adapter among its --lora-paths."
        )
    summed = next((module for module in folder.factors if module.endswith(BY_INPUTS)), "")
    if config.is_dora and ranks > 1 and summed:
        yield (
            f"{config.path} sets 'use_dora' and has factors for '{summed}', whose rows are cut between {ranks} ranks; "
            "serve it with --tensor-parallel-size 1."
        )


def biases_of_the_model(folder: AdapterFolder, spec: ModelSpec) -> Iterator[str]:
    """An adapter may replace a bias that the model has, if its config says so; and then it must."""
    config, parts = folder.config, [part for shape in site_shapes(spec) if shape.has_bias for part, _ in shape.parts]
    modules = [module_name(layer, part) for layer in range(spec.layers) for part in parts]
    for module, stored in folder.biases.items():
        if module not in modules:
            yield f"{_holds(stored)}, but this model has no bias there."
        elif not config.changes_bias(module):
            yield f"{_holds(stored)}, which {config.path.name} does not train: 'bias' is '{config.biases}'."
    for module in modules:
        if config.changes_bias(module) and module not in folder.biases:
            yield f"{folder.path} lacks the bias of '{module}', though {config.path.name} sets 'bias'."


# ── checks ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Each check yields a sentence for every fault. The first sentence is enough to refuse an adapter, and a fault is
# often in every layer.


@dataclass(frozen=True, slots=True)
class SlotKind:
    """What slots have room for; by default they are made for the adapter that is looked at."""

    max_rank: int | None = None
    extras: Extra = ~Extra.NONE
    ranks: int = 1  # of tensor parallel: how many share the model
    matrices: int | None = None  # places for an embedding or a head of an adapter's own; None: as many as it needs
    matrix_bytes: int = 0  # of one of these places
    growth: SlotGrowth | None = None  # gives slots the extras that they lack


ANY_SLOT = SlotKind()


def refusals(folder: AdapterFolder, spec: ModelSpec | None, slots: SlotKind = ANY_SLOT) -> Iterator[str]:
    """At most one sentence of each kind, none if the model can serve the adapter; without a spec, if any model can."""
    yield from folder.config.refusals
    yield from islice(_other_tensors(folder), 1)
    yield from islice(_unpaired_factors(folder), 1)
    yield from islice(vectors_of_factors(folder), 1)
    yield from islice(_ranks(folder, slots.max_rank), 1)
    if spec is not None:
        for check in MODEL_CHECKS:
            yield from islice(check(folder, spec), 1)
        yield from islice(own_tokens(folder, spec, slots.max_rank), 1)
    extras = slots.extras if slots.growth is None else ~Extra.NONE
    yield from room_for_gain_bias(folder, extras, slots.ranks)
    yield from islice(room_for_embed_head(folder, extras), 1)
    if slots.growth is not None and (reason := slots.growth.refusal(folder.config.extras)):
        yield f"{folder.config.path}: the adapter {reason}"
    if slots.matrices is not None:
        yield from room_for_matrices(folder, slots.matrices, slots.matrix_bytes)


def values_not_finite(folder: AdapterFolder) -> Iterator[str]:
    """A sentence for every tensor with NaN or infinity; reads all tensors that are served, and have been sized."""
    own = [folder.biases, folder.tokens, folder.matrices]
    served = [stored for one in folder.factors.values() for stored in one.stored]
    for stored in [*served, *(stored for some in own for stored in some.values())]:
        if not is_finite(stored.read()):
            yield f"{stored.file.path}: the tensor '{stored.name}' has values that are NaN or infinite."


def _other_tensors(folder: AdapterFolder) -> Iterator[str]:
    if not folder.factors and not folder.tokens and not folder.matrices:
        yield f"{folder.path} holds no LoRA factors (tensors named 'base_model.model.….lora_A.weight')."
    for stored in folder.other_tensors:
        yield f"{_holds(stored)}: it is no LoRA factor, which Rota does not serve."


def _unpaired_factors(folder: AdapterFolder) -> Iterator[str]:
    for module, factors in folder.factors.items():
        if factors.a is None or factors.b is None:
            there, missing = ("lora_A", "lora_B") if factors.b is None else ("lora_B", "lora_A")
            yield f"{_place(folder, module)}: '{module}' has a {there} without its {missing}."


def _ranks(folder: AdapterFolder, max_rank: int | None) -> Iterator[str]:
    config = folder.config
    for module, factors in folder.factors.items():
        rank = config.rank_of(module)
        if max_rank is not None and rank > max_rank:
            largest = max(map(config.rank_of, folder.factors))
            yield (
                f"{config.path} gives '{module}' rank {rank}, over the limit of {max_rank} that slots were made for; "
                f"start the server with --max-lora-rank {largest}, or with this adapter among its --lora-paths."
            )
        for stored, axis in ((factors.a, 0), (factors.b, 1)):
            if stored is not None and (len(stored.shape) != 2 or stored.shape[axis] != rank):
                yield f"{_has_shape(stored)}, but {config.path.name} gives it rank {rank}."


def _known_targets(folder: AdapterFolder, spec: ModelSpec) -> Iterator[str]:
    config, layers = folder.config, spec.layers
    for target in config.unknown_targets:
        yield (
            f"{config.path} targets '{target}', which names no module of this model; its {layers} layers have "
            f"{', '.join(PARENTS)}."
        )
    if beyond := [layer for layer in config.layers if not 0 <= layer < layers]:
        yield f"{config.path}: 'layers_to_transform' names layer {beyond[0]}, but this model has {layers} layers."


def _known_modules(folder: AdapterFolder, spec: ModelSpec) -> Iterator[str]:
    known = {*module_names(spec.layers), *END_MODULES}
    for module in folder.factors:
        if module not in known:
            yield (
                f"{_place(folder, module)} has factors for '{module}', which this model does not have; its "
                f"{spec.layers} layers have {', '.join(PARENTS)}."
            )


def _targeted_modules(folder: AdapterFolder, spec: ModelSpec) -> Iterator[str]:
    """The config must target the modules that the file holds, and no others."""
    config = folder.config
    for module in folder.factors:
        if module not in config.targeted and not (config.is_tying and module == HEAD):
            yield f"{_place(folder, module)} has factors for '{module}', which {config.path.name} does not target."
    if not config.names_targets:
        return
    for module in (*module_names(spec.layers), *END_MODULES):
        if module in config.targeted and module not in folder.factors:
            yield f"{folder.path} lacks the factors of '{module}', which {config.path.name} targets."


def _shapes(folder: AdapterFolder, spec: ModelSpec) -> Iterator[str]:
    for module, part, inputs, outputs in _modules_of(spec):
        factors = folder.factors.get(module, Factors())
        vectors = (folder.biases.get(module), factors.magnitude, factors.b_bias)
        for stored, axes, length, what in (
            (factors.a, slice(1, None), inputs, "inputs"),
            (factors.b, slice(1), outputs, "outputs"),
            *((vector, slice(None), outputs, "outputs") for vector in vectors),
        ):
            if stored is not None and stored.shape[axes] != (length,):
                yield (
                    f"{_has_shape(stored)}, but this model's {part} has {length} {what}; the adapter was made for "
                    "another model."
                )


def _modules_of(spec: ModelSpec) -> Iterator[tuple[str, str, int, int]]:
    """Each module of the layers: its name, its part, inputs and outputs."""
    for shape in site_shapes(spec):
        for part, outputs in shape.parts:
            for layer in range(spec.layers):
                yield module_name(layer, part), part, shape.inputs, outputs


def _holds(stored: StoredTensor) -> str:
    return f"{stored.file.path} holds the tensor '{stored.name}'"


def _has_shape(stored: StoredTensor) -> str:
    return f"{stored.file.path}: the tensor '{stored.name}' has the shape {list(stored.shape)}"


def _place(folder: AdapterFolder, module: str) -> str:
    factors = folder.factors[module]
    stored = next(each for each in (factors.a, factors.b, factors.base, factors.magnitude, factors.b_bias) if each)
    return str(stored.file.path)


MODEL_CHECKS: tuple[Callable[[AdapterFolder, ModelSpec], Iterator[str]], ...] = (
    _known_targets,
    _known_modules,
    _targeted_modules,
    biases_of_the_model,
    _shapes,
    shapes_of_embed_head,
    own_matrices,
)


# ── header check ────────────────────────────────────────────────────────────────────────────────────────────────────
# A header check says whether a model can serve an adapter, from its config and headers alone.


class HeaderCheck:
    """From any thread. Weights are not read, so values that are not finite are found later.

    Adapters of one recipe have the same config and the same headers, to the byte: such a header is checked once. A
    check takes some milliseconds, and to find that it was made before takes a third of one.
    """

    def __init__(self, spec: ModelSpec, slots: SlotKind, brought: Brought | None = None, ask: Inquire = answer) -> None:
        self._spec, self._slots = spec, slots
        self._brought, self._ask = brought or Brought(), ask
        self._passed: set[bytes] = set()

    def __call__(self, adapter: Adapter) -> str:
        """Why the model cannot serve the adapter, in a sentence; empty if nothing speaks against it. Blocks."""
        try:
            self.refuse(adapter)
        except Exception as error:  # whatever is wrong with its files, it is this adapter's alone
            return reason_for(adapter, error)
        return ""

    def refuse(self, adapter: Adapter) -> None:
        """Raises AdapterError if the model cannot serve the adapter. Of one in a source only headers are fetched."""
        ask = partial(self._ask, key=adapter.owner or "")
        with self._brought.place_of(adapter, is_outline=True) as place, FolderFiles(*place, ask) as files:
            if reason := self._refusal(files):
                raise AdapterError(reason)

    def _refusal(self, files: FolderFiles) -> str:
        if files.fingerprint in self._passed:
            return ""
        reason = next(refusals(AdapterFolder(files, self._spec.layers), self._spec, self._slots), "")
        if not reason:
            self._passed.add(files.fingerprint)
        return reason
