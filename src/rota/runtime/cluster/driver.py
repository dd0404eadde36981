"""The driver places engines on the Ray cluster, in a process of its own: Ray ends its process when the cluster is gone.

Everything that it has placed ends with it, by Ray's own rule, and it ends with the front.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from rota.core.version import DISTRIBUTION, __version__
from rota.runtime.cluster.joining import in_one_line, join, own_versions, unlike, unlike_files
from rota.runtime.cluster.records import (
    Away,
    Began,
    Cancel,
    Connected,
    Ended,
    EngineOrder,
    Joined,
    Leave,
    Listens,
    Node,
    Sight,
    Silent,
    Told,
)
from rota.runtime.cluster.remote_engine import run_invited
from rota.runtime.service import explain

# ── looks ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Looks ask the cluster's head: which machines there are, what is free on them, and where an engine was placed.


@dataclass(frozen=True, slots=True)
class EngineWhereabouts:
    """The machine of a placed engine, and whether it still lives; no name: it was never placed."""

    node: str = ""
    is_alive: bool = False
    node_id: str = ""  # by which Ray knows it; `node` is its address


def look(ray: Any) -> Sight | None:
    """What there is; None if this machine is no part of the cluster any more. Waits for the head's answer."""
    own = str(ray.get_runtime_context().get_node_id())
    alive = [node for node in ray.nodes() if node["Alive"]]
    if not any(node["NodeID"] == own for node in alive):
        return None
    nodes = sorted((node["NodeManagerAddress"], *_devices(node["Resources"])) for node in alive)
    return Sight(tuple(Node(*node) for node in nodes), *_devices(ray.available_resources()))


def find(ray: Any, group: Any, before: EngineWhereabouts) -> EngineWhereabouts:
    """Where a placement group has its bundle, or had it `before`: it loses its place when the machine is gone."""
    from ray.util.placement_group import placement_group_table

    placed = before.node_id or placement_group_table(group).get("bundles_to_node_id", {}).get(0, "")
    for node in ray.nodes():
        if node["NodeID"] == placed:
            return EngineWhereabouts(node["NodeManagerAddress"], node["Alive"], placed)
    return replace(before, is_alive=False)


def _devices(resources: dict[str, float]) -> tuple[int, int]:
    """GPUs and processors, as whole numbers: no replica has a part of one."""
    return int(resources.get("GPU", 0)), int(resources.get("CPU", 0))


# ── endings ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# How an engine on the cluster ended, from what Ray says of its actor.

# What a machine says that cannot import what an engine is made of.
_LACKS = "No module named"


def ending_of(number: int, error: Exception, where: EngineWhereabouts) -> Ended:
    """An actor that failed or died; `where` it was."""
    words = str(error)
    node = where.node or "?"
    if f"{_LACKS} 'rota" in words:
        why = f"Node {node} has no Rota that fits: install {DISTRIBUTION}[ray] {__version__} there."
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


# ── host ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# A host runs one engine on its machine of the cluster; Ray makes an actor of it, in a process of its own.


class EngineHost:
    """`check` comes first: it takes nothing that only equal versions could read."""

    def __init__(self) -> None:
        import ray

        self._address = str(ray.util.get_node_ip_address())

    def check(self, versions: dict[str, str]) -> str:
        """Why this machine cannot run an engine of this front; empty if it can."""
        return unlike(self._address, versions, own_versions())

    def run(self, order: EngineOrder) -> Iterator[Listens | Ended]:
        """The engine's life: where it listens, then how it ended."""
        _set_threads(order.job.threads)
        build_device, config = pickle.loads(order.job.engine)
        if refusal := unlike_files(self._address, order.job.facts, config):
            yield Ended(number=order.number, why=refusal, is_refused=True)
            return
        try:
            for told in run_invited(build_device, config, order.invitation, self._address):
                if isinstance(told, Joined):
                    yield Listens(order.number, told)
                else:
                    yield Ended(number=order.number, exit_code=told)
        except Exception as error:  # the front must hear why there is no engine
            yield Ended(number=order.number, exit_code=1, why=explain(error))


def _set_threads(threads: int | None) -> None:
    """Ray sets the variable to the reserved processors, and to one without any; an engine on a GPU may use them all."""
    os.environ.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


# How often a cluster that is away is asked again, and one that is there is looked at.
_AGAIN_S, _LOOK_S = 1.0, 1.0
# How often the head is asked whether an engine has its place.
_ASK_S = 0.5
# A head that has not answered for so long is silent.
_SILENT_S = 3.0


def attend(line: Connection, address: str) -> None:
    """Join the cluster, however long it is away, and carry out orders until the front or the cluster is gone."""
    import ray

    while reason := join(ray, address):
        line.send(Away(reason))
        if line.poll(_AGAIN_S):  # only an end comes before `Connected`
            return
    line.send(Connected(host=str(ray.util.get_node_ip_address())))
    asyncio.run(Driver(line, ray).run())
    ray.shutdown()


class Driver:
    """Carries out orders, each in a task of its own."""

    def __init__(self, line: Connection, ray: Any) -> None:
        self._line, self._ray = line, ray
        self._host = ray.remote(EngineHost)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._over = asyncio.Event()

    async def run(self) -> None:
        asyncio.get_running_loop().add_reader(self._line.fileno(), self._hear)
        looking = asyncio.create_task(self._look())
        await self._over.wait()
        for task in (looking, *self._tasks.values()):
            task.cancel()
        await asyncio.gather(looking, *self._tasks.values(), return_exceptions=True)

    def _tell(self, record: Told) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the front is gone, and `_hear` hears it
            self._line.send(record)

    def _hear(self) -> None:
        match heard := self._recv():
            case Leave():
                asyncio.get_running_loop().remove_reader(self._line.fileno())
                self._over.set()
            case EngineOrder(number=number):
                self._tasks[number] = asyncio.create_task(self._carry_out(heard))
            case Cancel(number) if number in self._tasks:
                self._tasks.pop(number).cancel()

    def _recv(self) -> Any:
        try:
            return self._line.recv()
        except (EOFError, ConnectionResetError):
            return Leave()

    async def _carry_out(self, order: EngineOrder) -> None:
        """An order that is cancelled gives back its place as well, also one that still waits for it."""
        from ray.util.placement_group import placement_group, remove_placement_group

        group, where = None, EngineWhereabouts()
        try:
            group = placement_group([order.need.bundle], strategy="STRICT_PACK")
            host = self._host_on(order, group)
            checked = host.check.remote(order.job.versions)
            # There is room on a machine before the actor's process runs there, which may need seconds more.
            while not (where := await self._where(group, where)).node:
                await asyncio.sleep(_ASK_S)
            self._tell(Began(order.number, where.node))
            if refusal := await checked:
                return self._tell(Ended(number=order.number, why=refusal, is_refused=True))
            async for record in host.run.options(num_returns="streaming").remote(order):
                self._tell(await record)
        except Exception as error:  # Ray fails in ways that it does not list, and the front must hear of each
            self._tell(ending_of(order.number, error, await self._where(group, where)))
        finally:
            if group is not None:
                remove_placement_group(group)  # ends its actor too
            self._tasks.pop(order.number, None)

    async def _where(self, group: Any, before: EngineWhereabouts) -> EngineWhereabouts:
        try:
            return await asyncio.to_thread(find, self._ray, group, before)
        except Exception:  # the head does not answer
            return before

    def _host_on(self, order: EngineOrder, group: Any) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # Ray would start an actor again on its own; the supervisor does that, with new keys and its own time-out.
        return self._host.options(
            num_cpus=order.need.bundle.get("CPU", 0),
            num_gpus=order.need.bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            max_restarts=0,
        ).remote()

    async def _look(self) -> None:
        """Tell what there is whenever it changes, and once that the head is silent."""
        last: Sight | Silent | None = None
        while not self._over.is_set():
            looking = asyncio.create_task(asyncio.to_thread(look, self._ray))
            await asyncio.wait([looking], timeout=_SILENT_S)
            if not looking.done() and last != Silent():
                self._tell(last := Silent())
            seen = await _seen(looking)
            if isinstance(seen, Away):
                self._tell(seen)
                return self._over.set()
            if seen != last:
                self._tell(last := seen)
            await asyncio.sleep(_LOOK_S)


async def _seen(looking: asyncio.Task[Sight | None]) -> Sight | Silent | Away:
    try:
        sight = await looking
    except Exception:  # Ray fails in ways that it does not list, and may see more the next time
        return Silent()
    return Away("This machine is no longer a part of it.") if sight is None else sight
