"""How an engine on the cluster ended, from what Ray says of its actor."""

from __future__ import annotations

from importlib.metadata import version

from rota.runtime.cluster.joining import in_one_line
from rota.runtime.cluster.looks import Whereabouts
from rota.runtime.cluster.records import Ended

# What a machine says that cannot import what an engine is made of.
_LACKS = "No module named"


def ending_of(number: int, error: Exception, where: Whereabouts) -> Ended:
    """An actor that failed or died; `where` it was."""
    words = str(error)
    node = where.node or "?"
    if f"{_LACKS} 'rota" in words:
        why = f"Node {node} has no Rota that fits: pip install 'rota[ray]=={version('rota')}' there."
        return Ended(number=number, why=why, is_refused=True)
    if _LACKS in words:
        lacking = words.split(_LACKS, 1)[1].split("'")[1]
        why = f"Node {node} has no module {lacking}, of which this server's engines are made."
        return Ended(number=number, why=why, is_refused=True)
    if where.node and not where.is_alive:
        return Ended(number=number, why=f"Node {node} of the Ray cluster is gone.")
    if "unavailable" in words:  # most likely for the same reason, which the head has not found out yet
        return Ended(number=number, why=f"Node {node} of the Ray cluster does not answer.")
    return Ended(number=number, why=f"The engine's actor on node {node} ended: {in_one_line(words)}")
