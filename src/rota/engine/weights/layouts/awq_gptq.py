"""AWQ's four bits (version gemm) and GPTQ's: eight codes in a word; all tensors are [inputs or groups, outputs]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile
from rota.engine.quantised.codes import Codes
from rota.engine.weights.layouts.layout import (
    INTEGERS,
    PLAIN,
    Layout,
    MatrixWindow,
    Rule,
    StoredTensors,
    Stretch,
    all_but,
    only,
    read_bits,
    read_group_size,
    read_modules,
)
from rota.engine.weights.layouts.packed import IN_WORD, MASK, groups_of, order_of, unpacked

WEIGHT, ZEROS, SCALES, GROUP_OF_INPUT = "qweight", "qzeros", "scales", "g_idx"

# ── awq ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Eight outputs in a word, in an order of their own, and zeros packed alike.

# In which nibble each of eight neighbours lies: the even ones below the odd ones.
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqLayout(Layout):
    """weight = (code - zero) * scale."""

    method: str = "AWQ"
    bits: Literal[4, 8] = 4

    def rules(self, outputs: int, inputs: int) -> tuple[Rule, ...]:
        groups, words = -(-inputs // (self.group_size or inputs)), -(-outputs // IN_WORD)
        return (
            Rule(suffix=WEIGHT, kinds=INTEGERS, shapes=((inputs, words),)),
            Rule(suffix=ZEROS, kinds=INTEGERS, shapes=((groups, words),)),
            Rule(suffix=SCALES, kinds=PLAIN, shapes=((groups, outputs),)),
        )

    def read(self, tensors: StoredTensors, window: MatrixWindow) -> Codes:
        size = self.group_size or window.inputs.end
        held, words = window.inputs.held_by(size), window.outputs.held_by(IN_WORD)

        def codes(rows: Tensor) -> Tensor:
            return window.outputs.within(unpacked(rows, 1, ORDER), 1, IN_WORD).T.contiguous()

        weights = codes(tensors.read(WEIGHT, window.inputs, words))
        return Codes(
            codes=weights,
            scales=tensors.scale(SCALES, held, window.outputs).T.contiguous(),
            zeros=codes(tensors.read(ZEROS, held, words)).float(),
            groups=groups_of(window.inputs.first, window.inputs.end, size, weights.device),
        )


def read_awq(config: ConfigFile) -> AwqLayout:
    """From a config's section `quantization_config`."""
    read_bits(config, "AWQ", "bits", "w_bit")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelError(
            f"{config.path} describes AWQ weights of the version '{version}', which Rota does not read; it reads the "
            "version 'gemm'."
        )
    only(config, "zero_point", (True,), "AWQ weights without zeros", "those with zero_point true")
    left_out = read_modules(config, "modules_to_not_convert")
    return AwqLayout(holds=all_but(left_out), group_size=read_group_size(config, "group_size", "q_group_size"))


# ── gptq ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Eight inputs in a word, the zeros of eight outputs in a word, and the group of each input.


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqLayout(Layout):
    """weight = (code - zero) * scale."""

    lowers_zeros: bool  # stores zero - 1
    method: str = "GPTQ"
    bits: Literal[4, 8] = 4

    def rules(self, outputs: int, inputs: int) -> tuple[Rule, ...]:
        groups = -(-inputs // (self.group_size or inputs))
        return (
            Rule(suffix=WEIGHT, kinds=INTEGERS, shapes=((-(-inputs // IN_WORD), outputs),)),
            Rule(suffix=ZEROS, kinds=INTEGERS, shapes=((groups, -(-outputs // IN_WORD)),)),
            Rule(suffix=SCALES, kinds=PLAIN, shapes=((groups, outputs),)),
            Rule(suffix=GROUP_OF_INPUT, kinds=INTEGERS, shapes=((inputs,),)),
        )

    def read(self, tensors: StoredTensors, window: MatrixWindow) -> Codes:
        count = tensors.shape(SCALES)[0]
        groups, held = _kept(order_of(tensors, GROUP_OF_INPUT, window.inputs, count))
        words = tensors.read(WEIGHT, window.inputs.held_by(IN_WORD), window.outputs)
        codes = window.inputs.within(unpacked(words, 0), 0, IN_WORD)
        return Codes(
            codes=codes.T.contiguous(),
            scales=tensors.scale(SCALES, held, window.outputs).T.contiguous(),
            zeros=self._zeros(tensors, window, held),
            groups=groups,
        )

    def _zeros(self, tensors: StoredTensors, window: MatrixWindow, held: Stretch) -> Tensor:
        words = tensors.read(ZEROS, held, window.outputs.held_by(IN_WORD))
        zeros = window.outputs.within(unpacked(words, 1), 1, IN_WORD)
        # AutoGPTQ adds the 1 in four bits, so a stored 15 is a zero of 0.
        return ((zeros + 1) & MASK if self.lowers_zeros else zeros).T.float()


def _kept(groups: Tensor) -> tuple[Tensor, Stretch]:
    """The groups from the first to the last that these inputs have, counted from the first."""
    first, last = int(groups.min()), int(groups.max())
    return groups - first, Stretch(first, last + 1)


def read_gptq(config: ConfigFile) -> GptqLayout:
    """From a config's section `quantization_config`."""
    read_bits(config, "GPTQ", "bits")
    formats = ("gptq", "gptq_v2")
    only(config, "checkpoint_format", formats, "GPTQ weights in another packing", f"those in {' or '.join(formats)}")
    only(config, "is_marlin_format", (False,), "GPTQ weights packed for Marlin", "those packed by AutoGPTQ")
    only(config, "lm_head", (False,), "a head in GPTQ's four bits", "a plain lm_head")
    only(config, "dynamic", ({},), "GPTQ weights that differ by module", "those with one config for all modules")
    only(config, "pack_dtype", ("int32",), "GPTQ weights in other words than int32", "those in int32")
    config.flag("desc_act")
    config.flag("sym")
    return GptqLayout(
        holds=all_but(read_modules(config, "modules_to_not_convert")),
        group_size=read_group_size(config, "group_size"),
        lowers_zeros=config.get("checkpoint_format", "gptq") == "gptq",
    )
