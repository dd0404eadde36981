"""An DeferredLora is a product of the model to which its adapters' part is still to be added.

On a GPU the operation that follows a product reads all of it anyway. So it can add the adapters' part meanwhile, which
saves a launch, and a time of writing and reading the product (decision 0023). Code that wants numbers closes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rota.engine.lora.layout import SiteFactors
from rota.engine.step.device_step import LoraBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredLora:
    """One site of one layer in one step."""

    y: Tensor  # [tokens, outputs], the model's own product; rows may lie apart
    shrunk: Tensor  # x @ A.T as `triton_ops.expand` takes it
    factors: SiteFactors
    batch: LoraBatch
    add: Callable[[Tensor, Tensor, SiteFactors, LoraBatch], None]  # adds the adapters' part to y

    def closed(self) -> Tensor:
        """y with the adapters' part; at most once, since y is overwritten."""
        self.add(self.y, self.shrunk, self.factors, self.batch)
        return self.y


# What a product gives to the operation that follows it.
Output = Tensor | DeferredLora


def closed(output: Output) -> Tensor:
    """The numbers of an output, whatever its form."""
    return output if isinstance(output, Tensor) else output.closed()
