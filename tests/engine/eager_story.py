"""Plans written by hand for adapters that come into slots, and copies that can be held up or fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from rota.core.adapter import Adapter
from rota.core.config import CacheConfig, EngineConfig, FirstAdapters, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.ids import BASE, AdapterId, BlockId, RequestId, Row, Slot
from rota.core.messages import AdapterFailed, AdapterFetched, AdapterReady, Message
from rota.core.plan import Chunk, Load, Seat, StepPlan
from rota.core.request import SamplingParams
from rota.engine.build import build_engine
from rota.engine.drawing import Ticket
from rota.engine.engine import Engine
from rota.engine.lora.bank import Bank
from rota.engine.lora.host import HostAdapter
from rota.engine.lora.loader import PendingCopy
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.waiting import TIMEOUT_S

ROWS, PAGES, BLOCK_SIZE = 5, 8, 8
PROMPT = (9, 8, 7, 200, 201, 5)


TWO_SLOTS = LoraConfig(max_loras_per_batch=2, max_lora_rank=16)


def build(folder: Path, first: FirstAdapters | None = None, **model: Any) -> Engine:
    """Row n is the base model's or adapter n's; two slots, or as the first adapters need them.

    Every graph is captured, because a step in a frame is rounded otherwise than one without.
    """
    engine = build_engine(
        EngineConfig(
            model=ModelConfig(model_path=str(folder), **{"dtype": "float32", "device": "cpu", **model}),
            cache=CacheConfig(kv_block_size=BLOCK_SIZE, kv_blocks=ROWS * PAGES),
            scheduler=SchedulerConfig(max_running_requests=ROWS, chunked_prefill_size=32),
            lora=LoraConfig() if first else TWO_SLOTS,
            first=first or FirstAdapters(),
            quiet=True,
        )
    )
    while engine.work_while_idle():
        pass
    return engine


def make_three(root: Path) -> tuple[Path, tuple[Adapter, ...]]:
    """A tiny model and three adapters of it, of different ranks."""
    model = make_tiny_model(root / "model", "llama3")
    adapters = []
    for number in (1, 2, 3):
        path = make_adapter(root / str(number), model, seed=number, r=4 * number)
        adapters.append(Adapter(adapter_id=AdapterId(number), name=f"adapter{number}", path=str(path)))
    return root / "model", tuple(adapters)


class Story:
    """Steps of an engine, with the messages that it posts."""

    def __init__(self, engine: Engine, adapters: Iterable[Adapter]) -> None:
        self.messages: list[Message] = []
        self.engine = engine
        self._changed = threading.Condition()
        engine.listen(self._post)
        adapters = tuple(adapters)
        self.step(fetches=adapters)
        self.wait_for(AdapterFetched, len(adapters))

    def _post(self, message: Message) -> None:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.messages)

    def wait_for(self, kind: type[Message], count: int) -> None:
        """Until so many messages of a kind have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.count(kind) >= count, TIMEOUT_S), self.messages

    def step(self, **orders: Any) -> tuple[int, ...]:
        """The tokens of a step, as `submit` takes it."""
        return self.engine.collect(self.submit(**orders)).tokens

    def submit(
        self,
        *,
        begin: Iterable[int] = (),
        decode: Iterable[int] = (),
        load: dict[int, int] | None = None,
        pages: dict[int, tuple[int, ...]] | None = None,
        fetches: tuple[Adapter, ...] = (),
    ) -> Ticket:
        """`begin` and `decode` name rows; `load` says which adapter comes into which slot, `pages` into which pages."""
        begin, pages = tuple(begin), pages or {}
        plan = StepPlan(
            step_id=1,
            seats=tuple(map(_seat, begin)),
            chunks=tuple(Chunk(row=Row(row), start=0, length=len(PROMPT), samples=True) for row in begin),
            decodes=tuple(map(Row, decode)),
            fetches=fetches,
            loads=tuple(
                Load(adapter_id=AdapterId(adapter), slot=Slot(slot), pages=pages.get(adapter, ()))
                for adapter, slot in (load or {}).items()
            ),
        )
        return self.engine.submit(plan)


def _seat(row: int) -> Seat:
    return Seat(
        request_id=RequestId(f"r{row}"),
        row=Row(row),
        adapter_id=AdapterId(row) if row else BASE,
        tokens=PROMPT,
        prompt_length=len(PROMPT),
        blocks=tuple(BlockId(row * PAGES + page) for page in range(PAGES)),
        sampling=SamplingParams(temperature=0.0),
    )


def slots_change_hands_every_step(story: Story, rounds: int, is_patient: bool) -> list[tuple[int, ...]]:
    """Each step orders an adapter into the slot that the step before used, and runs the one ordered before it.

    A patient story goes on only when the copy has been reported.
    """
    told: list[tuple[int, ...]] = []
    for number in range(rounds + 1):
        adapter, former = number % 3 + 1, (number - 1) % 3 + 1
        load = {adapter: number % 2} if number < rounds else {}
        if number == 0:
            story.step(load=load)
        elif number <= 3:
            told.append(story.step(load=load, begin=[former]))
        else:
            told.append(story.step(load=load, decode=[former]))
        if is_patient:
            story.wait_for(AdapterReady, min(number + 1, rounds))
    return told


# Adapters of ranks 4, 8 and 12.
FIRST_THREE = FirstAdapters(count=3, rank=12, pages=4)


def pages_change_hands_every_step(story: Story, rounds: int, is_patient: bool) -> list[tuple[int, ...]]:
    """As above, with four slots: each step orders an adapter into pages that the step before used for another slot."""
    told: list[tuple[int, ...]] = []
    for number in range(rounds + 1):
        adapter, former = number % 3 + 1, (number - 1) % 3 + 1
        two = ((3, 1), (0, 2))[number % 2]
        pages = two if adapter == 3 else two[number // 2 % 2 :][:1]
        orders: dict[str, Any] = {}
        if number < rounds:
            orders = {"load": {adapter: number % 4}, "pages": {adapter: pages}}
        if number:
            orders["begin" if number <= 3 else "decode"] = [former]
        told.append(story.step(**orders))
        if is_patient:
            story.wait_for(AdapterReady, min(number + 1, rounds))
    return told[1:]


class LateCopies:
    """Copies that begin only when a step waits for them: as late as a copy can be."""

    def __init__(self, monkeypatch: Any, on_device: Callable[[], None] | None = None) -> None:
        self._asked = threading.Semaphore(0)
        copy_in, wait = Bank.copy_in, PendingCopy.wait

        def late(bank: Bank, slot: Slot, adapter: HostAdapter, *places: Sequence[int]) -> None:
            assert self._asked.acquire(timeout=TIMEOUT_S), "no step has waited for this copy"
            if on_device:
                on_device()
            copy_in(bank, slot, adapter, *places)

        def ask(pending: PendingCopy) -> None:
            self._asked.release()
            wait(pending)

        monkeypatch.setattr(Bank, "copy_in", late)
        monkeypatch.setattr(PendingCopy, "wait", ask)


class HeldCopies:
    """Copies that stand still until `release`."""

    def __init__(self, monkeypatch: Any) -> None:
        self._is_open = threading.Event()
        self.has_begun = threading.Event()
        copy_in = Bank.copy_in

        def held(bank: Bank, slot: Slot, adapter: HostAdapter, *places: Sequence[int]) -> None:
            self.has_begun.set()
            assert self._is_open.wait(TIMEOUT_S)
            copy_in(bank, slot, adapter, *places)

        monkeypatch.setattr(Bank, "copy_in", held)

    def release(self) -> None:
        self._is_open.set()


def fail_behind_copy(monkeypatch: Any) -> None:
    """The next copies are written and fail then, so that only the engine can see that they are no good."""
    copy_in = Bank.copy_in

    def failing(bank: Bank, slot: Slot, adapter: HostAdapter, *places: Sequence[int]) -> None:
        copy_in(bank, slot, adapter, *places)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Bank, "copy_in", failing)


def failed(story: Story) -> list[AdapterFailed]:
    return [message for message in story.messages if isinstance(message, AdapterFailed)]
