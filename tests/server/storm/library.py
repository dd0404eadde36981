"""Adapters of a tiny model, good ones and bad ones, and what PEFT answers with each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache

from rota.engine.lora.files.folder import CONFIG, SINGLE
from tests.engine.lora.adapter_factory import change_config, change_tensors, load_with_peft, make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.tiny_tokenizer import write_byte_tokenizer

GOOD = ("a", "b", "c")
# Can be read, and computes what is not a number.
RUINED = "ruined"
# Cannot be read: weights that are not numbers, of another rank than the config says, of another model, cut off.
BAD = ("nan", "ranked", "foreign", "cut")


class Part(NamedTuple):
    """A stretch of an answer: the adapter that gave it, its first token, and whether it saw KV of the one before."""

    kind: str
    start: int
    keeps_kv: bool = False


@dataclass(frozen=True)
class Library:
    """A model, and a folder for each kind of adapter."""

    folder: Path

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    def path(self, kind: str) -> Path:
        return self.folder / kind

    def weights(self, kind: str) -> bytes:
        return (self.path(kind) / SINGLE).read_bytes()

    def config(self, kind: str) -> str:
        return (self.path(kind) / CONFIG).read_text()

    def kind_of(self, folder: str) -> str:
        """The kind that lies in a folder, wherever that is."""
        return self._digests()[sha256((Path(folder) / SINGLE).read_bytes()).hexdigest()]

    def answer(self, parts: Sequence[Part], prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """What PEFT says at each token of an answer, after the tokens before it."""
        said, known = list[int](), [*prompt, *tokens]
        kept, computed = DynamicCache(), 0
        ends = [*(part.start for part in parts[1:]), len(tokens)]
        for part, end in zip(parts, ends, strict=True):
            if not part.keeps_kv:
                kept, computed = DynamicCache(), 0
            first, last = len(prompt) + part.start - 1, len(prompt) + end - 1
            if end > part.start:
                asked = torch.tensor([known[computed:last]])
                with torch.inference_mode():
                    logits = self._model(part.kind)(input_ids=asked, past_key_values=kept, use_cache=True).logits[0]
                said += logits[first - computed :].argmax(-1).tolist()
                computed = last
        return said

    @cache  # noqa: B019, one library lives as long as the tests
    def _model(self, kind: str) -> PeftModel:
        return load_with_peft(self.path(kind), _base(self.model_folder))

    @cache  # noqa: B019
    def _digests(self) -> dict[str, str]:
        return {sha256(self.weights(kind)).hexdigest(): kind for kind in (*GOOD, RUINED, *BAD)}


@cache
def _base(folder: Path) -> object:
    return make_tiny_model(folder, "smollm2")


def make_library(folder: Path) -> Library:
    library = Library(folder)
    model = make_tiny_model(write_byte_tokenizer(library.model_folder), "smollm2")
    for seed, kind in enumerate((*GOOD, RUINED, *BAD)):
        make_adapter(library.path(kind), model, seed=seed, r=4 if seed % 2 else 2)
    change_tensors(library.path(RUINED), partial(_times, 1e25))
    change_tensors(library.path("nan"), partial(_times, math.nan))
    change_config(library.path("ranked"), r=7)
    other = make_tiny_model(folder / "other", "llama2")
    make_adapter(library.path("foreign"), other, seed=9)
    whole = library.weights("cut")
    (library.path("cut") / SINGLE).write_bytes(whole[: len(whole) // 2])
    return library


def _times(factor: float, tensors: dict[str, Tensor]) -> None:
    for one in tensors.values():
        one.mul_(factor)
