"""Checks of what DoRA and biases bring besides factors: one vector for a module, as long as its outputs."""

from __future__ import annotations

from collections.abc import Iterator

from rota.core.extras import Extra
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.tensor_file import Stored
from rota.engine.model.sites import biased_parts, module_name, site_shapes
from rota.engine.model.spec import ModelSpec
from rota.engine.parallel.shard import BY_INPUTS


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
                yield (
                    f"{stored.file.path} holds the tensor '{stored.name}', but {config.path.name} does not set "
                    f"'{field}'."
                )


def room_for_trims(folder: AdapterFolder, extras: Extra, ranks: int) -> Iterator[str]:
    """The bank must have trims, and a rank that has only a part of a sum cannot know a row's norm."""
    config = folder.config
    needs_trims = config.is_dora or config.has_factor_biases or bool(folder.biases)
    if needs_trims and Extra.TRIMS not in extras:
        field = "use_dora" if config.is_dora else "lora_bias" if config.has_factor_biases else "bias"
        yield (
            f"{config.path} sets '{field}', for which this server's slots have no room; start the server with this "
            "adapter among its --lora-paths."
        )
    if config.is_dora and ranks > 1 and (module := _summed(folder)):
        yield (
            f"{config.path} sets 'use_dora' and has factors for '{module}', whose rows are cut between {ranks} ranks; "
            "serve it with --tensor-parallel-size 1."
        )


def biases_of_the_model(folder: AdapterFolder, spec: ModelSpec) -> Iterator[str]:
    """An adapter may replace a bias that the model has, if its config says so; and then it must."""
    config, parts = folder.config, biased_parts(spec)
    modules = [module_name(layer, part) for layer in range(spec.layers) for part in parts]
    for module, stored in folder.biases.items():
        if module not in modules:
            yield f"{stored.file.path} holds the tensor '{stored.name}', but this model has no bias there."
        elif not config.changes_bias(module):
            yield (
                f"{stored.file.path} holds the tensor '{stored.name}', which {config.path.name} does not train: 'bias' "
                f"is '{config.biases}'."
            )
    for module in modules:
        if config.changes_bias(module) and module not in folder.biases:
            yield f"{folder.path} lacks the bias of '{module}', though {config.path.name} sets 'bias'."


def lengths(folder: AdapterFolder, spec: ModelSpec) -> Iterator[str]:
    for shape in site_shapes(spec):
        for part, outputs in shape.parts:
            for layer in range(spec.layers):
                for stored in vectors(folder, module_name(layer, part)):
                    if stored.shape != (outputs,):
                        yield (
                            f"{stored.file.path}: the tensor '{stored.name}' has the shape {list(stored.shape)}, but "
                            f"this model's {part} has {outputs} outputs; the adapter was made for another model."
                        )


def vectors(folder: AdapterFolder, module: str) -> list[Stored]:
    """All that a module has besides its factors."""
    factors = folder.factors.get(module)
    found = [folder.biases.get(module)]
    if factors is not None:
        found += [factors.magnitude, factors.b_bias]
    return [stored for stored in found if stored is not None]


def _summed(folder: AdapterFolder) -> str:
    return next((module for module in folder.factors if module.endswith(BY_INPUTS)), "")
