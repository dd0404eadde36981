"""A decode step with DoRA and with factors of the head, against plain LoRA of the same rank, each in its own engine."""

from __future__ import annotations

import gc
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapter_features import KINDS, write_adapter
from rota.core.adapter import Adapter
from rota.core.ids import AdapterId
from rota.engine.families.table import read_spec
from rota.llm.config import engine_config, first_adapters, locate_model, with_first

from .stage import Stage, milliseconds

ADAPTERS = 6


def feature_steps(model: Path, options: dict[str, Any], decodes: int, tokens: int) -> dict[str, Any]:
    """Medians of steps that only decode, all answers with adapters of one kind."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for number, (kind, fields) in enumerate(KINDS.items()):
            path = write_adapter(Path(place) / str(number), read_spec(model), **fields)
            found[kind] = milliseconds(_steps(model, path, options, decodes, tokens))
    plain = found["LoRA"]["median"]
    for kind, told in found.items():
        told["more_than_lora"] = round(told["median"] / plain - 1, 4)
        assert kind in KINDS
    return found


def _steps(model: Path, path: Path, options: dict[str, Any], decodes: int, tokens: int) -> list[float]:
    names = [f"a{number}" for number in range(1, ADAPTERS + 1)]
    paths = [f"{name}={path}" for name in names]
    asked = {"model_path": str(model), "max_loras_per_batch": ADAPTERS, "lora_paths": paths, **options}
    config = locate_model(engine_config(asked, quiet=True))
    stage = Stage(with_first(config, first_adapters(config)))
    try:
        adapters = [
            Adapter(adapter_id=AdapterId(number), name=name, path=str(path)) for number, name in enumerate(names, 1)
        ]
        stage.add(adapters)
        ids = [adapter.adapter_id for adapter in adapters]
        stage.serve(decodes, 16, 16, ids)  # what is compiled or allocated, is so here
        steps = stage.serve(decodes, 16, min(tokens, 200), ids)
        assert statistics.median(steps) > 0.0
        return steps
    finally:
        stage.engine.close()
        del stage
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
