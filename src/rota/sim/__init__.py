"""The simulator runs the same loop and scheduler in virtual time, without torch."""

from rota.sim.cost import LinearCost, read_cost
from rota.sim.world import VirtualWorld

__all__ = ["LinearCost", "VirtualWorld", "read_cost"]
