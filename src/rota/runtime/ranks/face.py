"""What the kernel, the commands and other extensions use of ranks."""

from rota.runtime.ranks.follower import attend
from rota.runtime.ranks.lead import build_ranks
from rota.runtime.ranks.meeting import compared, facts, versions
from rota.runtime.ranks.processes import torchrun_place

__all__ = ["attend", "build_ranks", "compared", "facts", "torchrun_place", "versions"]
