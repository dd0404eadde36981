"""AWQ's four bits (version gemm): eight outputs in a word, in an order of their own, and zeros packed alike."""

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
    all_but,
    only,
    read_bits,
    read_group_size,
    read_modules,
)
from rota.engine.weights.layouts.packed import IN_WORD, groups_of, unpacked

WEIGHT, ZEROS, SCALES = "qweight", "qzeros", "scales"
# In which nibble each of eight neighbours lies: the even ones below the odd ones.
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqLayout(Layout):
    """weight = (code - zero) * scale; all tensors are [inputs or groups, outputs]."""

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
