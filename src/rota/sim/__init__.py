"""The simulator runs the same loop and scheduler in virtual time, without torch."""

from rota.sim.cost import ConstantCost, CostModel
from rota.sim.world import VirtualWorld

__all__ = ["ConstantCost", "CostModel", "VirtualWorld"]
