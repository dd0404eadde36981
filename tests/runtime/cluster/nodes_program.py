"""A real Ray cluster on this machine, as a program: it reads orders, a line each, and answers each with a line.

`python nodes_program.py NODES PROCESSORS PORT SETTINGS` starts so many nodes with so many processors each, the head
among them, and says the cluster's address. PORT is the head's, 0: any; SETTINGS are Ray's own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ray.cluster_utils import Cluster

# The least that Ray takes: nothing large is stored there.
_STORE_BYTES = 80_000_000


def main(number: int, processors: int, port: int, settings: dict[str, Any]) -> None:
    size = {"num_cpus": processors, "object_store_memory": _STORE_BYTES}
    head = size | {"include_dashboard": False, "_system_config": settings} | ({"gcs_server_port": port} if port else {})
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(wait=False, **size) for _ in range(number - 1)]
    cluster.wait_for_nodes(120)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["add", devices]:
                nodes.append(cluster.add_node(**size | json.loads(devices)))
            case ["remove", which]:
                cluster.remove_node(nodes[int(which)], allow_graceful=False)
            case ["stop-head"]:
                cluster.head_node.kill_gcs_server(check_alive=False)
            case ["start-head"]:
                cluster.head_node.start_gcs_server()
        print("done", flush=True)


if __name__ == "__main__":
    nodes_wanted, processors_each, head_port = map(int, sys.argv[1:4])
    main(nodes_wanted, processors_each, head_port, json.loads(sys.argv[4]))
