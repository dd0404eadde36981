"""The table of families: a folder names its architecture, and the table has the family that reads and computes it."""

from __future__ import annotations

from pathlib import Path

from rota.core.errors import ModelError
from rota.engine.families import gemma3, granite, llama, olmo2
from rota.engine.families.decoder import Decoder, Family, Kernels
from rota.engine.model.config_file import ConfigFile
from rota.engine.model.spec import ModelSpec
from rota.engine.weights.load import Weights

FAMILIES: dict[str, Family] = {
    family.architecture: family for family in (*llama.FAMILIES, olmo2.FAMILY, granite.FAMILY, gemma3.FAMILY)
}


def read_spec(folder: Path) -> ModelSpec:
    """Read a model folder's config.json, and the end-of-sequence tokens of its generation_config.json."""
    if not folder.is_dir():
        raise ModelError(f"There is no model folder at {folder}; give a folder in Hugging Face format.")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model folder: it has no config.json. Give a folder in Hugging Face format, with "
            "config.json, tokenizer.json and *.safetensors."
        )
    config = ConfigFile(folder / "config.json")
    spec = _family(config).read(config)
    assert isinstance(spec, ModelSpec), "a family reads a ModelSpec"
    return spec


def make_model(spec: ModelSpec, weights: Weights, kernels: Kernels) -> Decoder:
    """The forward pass of a spec's family."""
    return FAMILIES[spec.architecture].make(spec, weights, kernels)


def _family(config: ConfigFile) -> Family:
    names = config.get("architectures", [])
    for architecture, family in FAMILIES.items():
        if isinstance(names, list) and architecture in names:
            return family
    raise ModelError(
        f"{config.path} names the architectures {names!r} (model_type {config.get('model_type')!r}), none of which "
        f"Rota runs; it runs {', '.join(FAMILIES)}."
    )
