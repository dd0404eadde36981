"""Checks say why a model cannot serve an adapter, nearly all before a weight is read.

Each check yields a sentence for every fault. The first sentence is enough to refuse an adapter, and a fault is often in
every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from rota.core.extras import Extra
from rota.engine.lora.files.end_checks import own_tokens, room_for_ends, shapes_of_ends
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.matrix_checks import own_matrices, room_for_matrices
from rota.engine.lora.files.names import ENDS, HEAD
from rota.engine.lora.files.trim_checks import biases_of_the_model, lengths, room_for_trims, vectors_of_factors
from rota.engine.lora.growth import Growth
from rota.engine.model.sites import PARENTS, module_name, module_names, site_shapes
from rota.engine.model.spec import ModelSpec
from rota.engine.weights.finite import is_finite


@dataclass(frozen=True, slots=True)
class SlotKind:
    """What slots have room for; by default they are made for the adapter that is looked at."""

    max_rank: int | None = None
    extras: Extra = ~Extra.NONE
    ranks: int = 1  # of tensor parallel: how many share the model
    matrices: int | None = None  # places for an embedding or a head of an adapter's own; None: as many as it needs
    matrix_bytes: int = 0  # of one of these places
    growth: Growth | None = None  # gives slots the extras that they lack


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
    yield from room_for_trims(folder, extras, slots.ranks)
    yield from islice(room_for_ends(folder, extras), 1)
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
        yield f"{stored.file.path} holds the tensor '{stored.name}': it is no LoRA factor, which Rota does not serve."


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
                yield (
                    f"{stored.file.path}: the tensor '{stored.name}' has the shape {list(stored.shape)}, but "
                    f"{config.path.name} gives it rank {rank}."
                )


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
    known = {*module_names(spec.layers), *ENDS}
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
    for module in (*module_names(spec.layers), *ENDS):
        if module in config.targeted and module not in folder.factors:
            yield f"{folder.path} lacks the factors of '{module}', which {config.path.name} targets."


def _shapes(folder: AdapterFolder, spec: ModelSpec) -> Iterator[str]:
    for shape in site_shapes(spec):
        for part, outputs in shape.parts:
            for layer in range(spec.layers):
                factors = folder.factors.get(module_name(layer, part))
                if factors is None:
                    continue
                for stored, axis, wanted in ((factors.a, 1, shape.inputs), (factors.b, 0, outputs)):
                    if stored is not None and len(stored.shape) == 2 and stored.shape[axis] != wanted:
                        yield (
                            f"{stored.file.path}: the tensor '{stored.name}' has the shape {list(stored.shape)}, but "
                            f"this model's {part} has {wanted} {('outputs', 'inputs')[axis]}; the adapter was made "
                            "for another model."
                        )


def _place(folder: AdapterFolder, module: str) -> str:
    factors = folder.factors[module]
    stored = next(each for each in (factors.a, factors.b, factors.base, factors.magnitude, factors.b_bias) if each)
    return str(stored.file.path)


MODEL_CHECKS: tuple[Callable[[AdapterFolder, ModelSpec], Iterator[str]], ...] = (
    _known_targets,
    _known_modules,
    _targeted_modules,
    _shapes,
    shapes_of_ends,
    own_matrices,
    biases_of_the_model,
    lengths,
)
