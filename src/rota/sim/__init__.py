"""A world made of arithmetic: the same loop and scheduler in virtual time, without torch."""

from rota.sim.world import VirtualWorld

__all__ = ["VirtualWorld"]
