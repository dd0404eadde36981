"""A lookout sees which machines the cluster has, what is free on them, and on which of them an engine was placed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota.runtime.cluster.needs import Node, Sight


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The machine of a placed engine, and whether it still lives; no name: it was never placed."""

    node: str = ""
    is_alive: bool = False


class Lookout:
    """Asks the cluster's head, and waits for its answer."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._own = str(ray.get_runtime_context().get_node_id())

    def look(self) -> Sight | None:
        """What there is; None if this machine is no part of the cluster any more."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        if not any(node["NodeID"] == self._own for node in alive):
            return None
        nodes = sorted((node["NodeManagerAddress"], *_devices(node["Resources"])) for node in alive)
        return Sight(tuple(Node(*node) for node in nodes), *_devices(self._ray.available_resources()))

    def find(self, group: Any) -> Whereabouts:
        """Where a placement group has its bundle."""
        from ray.util.placement_group import placement_group_table

        placed = placement_group_table(group).get("bundles_to_node_id", {}).get(0, "")
        for node in self._ray.nodes():
            if node["NodeID"] == placed:
                return Whereabouts(node["NodeManagerAddress"], node["Alive"])
        return Whereabouts()


def _devices(resources: dict[str, float]) -> tuple[int, int]:
    """GPUs and processors, as whole numbers: no replica has a part of one."""
    return int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
