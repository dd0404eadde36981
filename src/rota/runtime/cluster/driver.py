"""The driver places engines on the Ray cluster, in a process of its own: Ray ends its process when the cluster is gone.

Everything that it has placed ends with it, by Ray's own rule, and it ends with the front.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rota.runtime.cluster.endings import ending_of
from rota.runtime.cluster.host import EngineHost
from rota.runtime.cluster.joining import join
from rota.runtime.cluster.looks import Lookout, Whereabouts
from rota.runtime.cluster.needs import Sight
from rota.runtime.cluster.records import Away, Began, Cancel, Connected, Ended, Leave, Order, Seen, Silent, Told

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
        self._lookout = Lookout(ray)
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
            case Order(number=number):
                self._tasks[number] = asyncio.create_task(self._carry_out(heard))
            case Cancel(number) if number in self._tasks:
                self._tasks.pop(number).cancel()

    def _recv(self) -> Any:
        try:
            return self._line.recv()
        except (EOFError, ConnectionResetError):
            return Leave()

    async def _carry_out(self, order: Order) -> None:
        """An order that is cancelled gives back its place as well, also one that still waits for it."""
        from ray.util.placement_group import placement_group, remove_placement_group

        group = None
        try:
            group = placement_group([order.need.bundle], strategy="STRICT_PACK")
            await self._host_engine(order, group)
        except Exception as error:  # Ray fails in ways that it does not list, and the front must hear of each
            self._tell(ending_of(order.number, error, await self._where(group)))
        finally:
            if group is not None:
                remove_placement_group(group)  # ends its actor too
            self._tasks.pop(order.number, None)

    async def _reserved(self, group: Any) -> str:
        """Wait for room on a machine and give its address. The actor's process there may need seconds more."""
        while not (where := await self._where(group)).node:
            await asyncio.sleep(_ASK_S)
        return where.node

    async def _where(self, group: Any) -> Whereabouts:
        try:
            return await asyncio.to_thread(self._lookout.find, group)
        except Exception:  # the head does not answer: where an engine was is then not known
            return Whereabouts()

    async def _host_engine(self, order: Order, group: Any) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # Ray would start an actor again on its own; the supervisor does that, with new keys and its own patience.
        host = self._host.options(
            num_cpus=order.need.bundle.get("CPU", 0),
            num_gpus=order.need.bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            max_restarts=0,
        ).remote()
        checked = host.check.remote(order.job.versions)
        self._tell(Began(order.number, await self._reserved(group)))
        if refusal := await checked:
            return self._tell(Ended(number=order.number, why=refusal, is_refused=True))
        async for record in host.run.options(num_returns="streaming").remote(order):
            self._tell(await record)

    async def _look(self) -> None:
        """Tell what there is whenever it changes, and once that the head is silent."""
        last: Seen | Silent | None = None
        while not self._over.is_set():
            look = asyncio.create_task(asyncio.to_thread(self._lookout.look))
            await asyncio.wait([look], timeout=_SILENT_S)
            if not look.done() and last != Silent():
                self._tell(last := Silent())
            seen = await _seen(look)
            if isinstance(seen, Away):
                self._tell(seen)
                return self._over.set()
            if seen != last:
                self._tell(last := seen)
            await asyncio.sleep(_LOOK_S)


async def _seen(look: asyncio.Task[Sight | None]) -> Seen | Silent | Away:
    try:
        sight = await look
    except Exception:  # Ray fails in ways that it does not list, and may see more the next time
        return Silent()
    return Away("This machine is no longer a part of it.") if sight is None else Seen(sight)
