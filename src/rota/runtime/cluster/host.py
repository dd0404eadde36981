"""A host runs one engine on its machine of the cluster; Ray makes an actor of it, in a process of its own."""

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Iterator

from rota.core.config import EngineConfig
from rota.runtime.cluster.alike import own_versions, unlike, unlike_files
from rota.runtime.cluster.records import Ended, Listens, Order
from rota.runtime.remote.invitation import Joined
from rota.runtime.remote.serve import run_invited
from rota.runtime.service import BuildDevice, explain

Records = queue.SimpleQueue[Listens | Ended]


class EngineHost:
    """`check` comes first: it takes nothing that only equal versions could read."""

    def __init__(self) -> None:
        import ray

        self._address = str(ray.util.get_node_ip_address())

    def check(self, versions: dict[str, str]) -> str:
        """Why this machine cannot run an engine of this front; empty if it can."""
        return unlike(self._address, versions, own_versions())

    def run(self, order: Order) -> Iterator[Listens | Ended]:
        """The engine's life: where it listens, then how it ended."""
        _set_threads(order.job.threads)
        build_device, config = pickle.loads(order.job.engine)
        if refusal := unlike_files(self._address, order.job.facts, config):
            yield Ended(number=order.number, why=refusal, is_refused=True)
            return
        told: Records = queue.SimpleQueue()
        # The engine's process ends with the thread that starts it, so one thread does nothing else.
        serve = threading.Thread(target=self._serve, args=(order, build_device, config, told), name="rota-host")
        serve.start()
        is_over = False
        while not is_over:
            yield (record := told.get())
            is_over = isinstance(record, Ended)

    def _serve(self, order: Order, build_device: BuildDevice, config: EngineConfig, told: Records) -> None:
        def listens(joined: Joined) -> None:
            told.put(Listens(order.number, joined))

        try:
            code = run_invited(build_device, config, order.invitation, self._address, listens)
            told.put(Ended(number=order.number, exit_code=code))
        except Exception as error:  # the border of a thread: the front must hear why there is no engine
            told.put(Ended(number=order.number, exit_code=1, why=explain(error)))


def _set_threads(threads: int | None) -> None:
    """Ray sets the variable to the reserved processors, and to one without any; an engine on a GPU may use them all."""
    os.environ.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
