"""A storm over versions, routes, clients and the engine, in which each answer is PEFT's with the versions it names.

Registry, routes, updates and streams are the server's own, and the engine is a real one with a tiny model.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rota.core.config import EngineConfig
from rota.core.events import Moved
from rota.core.ids import BASE
from rota.core.messages import AddAdapter
from rota.llm.config import build_device, engine_config
from rota.runtime.registry import Registry
from rota.text.tokenizer import Tokenizer
from tests.server.applications import made_app
from tests.server.storm.calls import CODES, Ask, Call, Inline, Judge, Tokens, turns
from tests.server.storm.library import BAD, GOOD, RUINED, Library
from tests.server.storm.stepped import SteppedService

NAMES = ("legal", "poet")
PROMPTS = ((5, 9, 77, 130, 4), tuple(range(40, 60)), (*range(40, 60), 7, 7, 9))
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "kv_blocks": 48,
    "kv_block_size": 8,
    "max_running_requests": 4,
    "max_loras_per_batch": 2,
    "max_loaded_loras": 3,
    "max_lora_rank": 4,
    "chunked_prefill_size": 32,
}
DICE = st.integers(0, 1_000)
# How many passes the engine makes before the next thing happens.
PASSES = st.integers(0, 6)
RARELY = st.sampled_from([False, False, False, True])
TERMS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"keep_old": True}, {"mode": "stage"}, {"mode": "switch"}, {"mode": "switch", "kv": "keep"}]
)
# A storm that has not calmed down after so many passes never will.
MOST_PASSES = 3_000


class Storm(RuleBasedStateMachine):
    """Clients, operators and faults, between any two passes of the engine."""

    library: ClassVar[Library]

    def __init__(self) -> None:
        super().__init__()
        self.spools, self.shelf = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
        for kind in (*GOOD, RUINED, *BAD):
            shutil.copytree(self.library.path(kind), Path(self.shelf.name, kind))
        self.tempdir, tempfile.tempdir = tempfile.tempdir, self.spools.name
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(Inline())
        self.asks: list[Ask] = []
        self.calls: list[Call] = []
        self.failing_copies = 0
        self.kills = 0
        config = engine_config({"model_path": str(self.library.model_folder), **OPTIONS}, quiet=True)
        self.service = self.new_service(partial(self._built, config), config)
        self.judge = Judge(self.library, self.service.events)
        self.registry = Registry("tiny", str(self.library.model_folder))
        with mock.patch("rota.server.adapters.upload.ThreadPoolExecutor", Inline):
            self.app = made_app(self.service, Tokenizer(self.library.model_folder), self.registry)
        self.lifespan = self.app.router.lifespan_context(self.app)
        self.loop.run_until_complete(self.lifespan.__aenter__())

    def new_service(self, build: Callable[[], Any], config: EngineConfig) -> Any:
        return SteppedService(build, config, self._note)

    def _built(self, config: Any) -> Any:
        engine: Any = build_device(config)
        bank = engine._adapters.bank
        copy_in = bank.copy_in

        def copy_or_fail(*args: Any) -> None:
            if self.failing_copies:
                self.failing_copies -= 1
                raise OSError("the bus is broken")
            copy_in(*args)

        bank.copy_in = copy_or_fail
        return engine

    def _note(self, message: AddAdapter) -> None:
        adapter = message.adapter
        # A folder that is away may be back when it is read.
        for place in filter(os.path.exists, (adapter.path, f"{adapter.path}-away")):
            self.judge.kinds[adapter.name, adapter.version] = self.library.kind_of(place)

    # ── what may happen ──────────────────────────────────────────────────────────────────────────────────────────

    @initialize(kinds=st.lists(st.sampled_from(GOOD), min_size=1, max_size=2))
    def load(self, kinds: list[str]) -> None:
        for name, kind in zip(NAMES, kinds, strict=False):
            self.call("PUT", f"/v1/adapters/{name}", body=_json({"path": self.path(kind)}))
        self.steps(4)

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from(GOOD), terms=TERMS, passes=PASSES)
    def update(self, name: str, kind: str, terms: dict[str, Any], passes: int) -> None:
        self.call("PUT", f"/v1/adapters/{name}", body=_json({"path": self.path(kind), **terms}))
        self.steps(passes)

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from([*GOOD, RUINED, *BAD]), terms=TERMS, is_cut=RARELY)
    def send(self, name: str, kind: str, terms: dict[str, Any], is_cut: bool) -> None:
        """Weights in a body, of which a client may send only half."""
        query = {"config": self.library.config(kind), **{key: _plain(value) for key, value in terms.items()}}
        sent = {"body": self.library.weights(kind), "kind": "application/octet-stream", "query": query}
        self.call("PUT", f"/v1/adapters/{name}", **sent, is_cut=is_cut)

    @precondition(lambda self: self.registry.others)
    @rule(number=DICE, mode=st.sampled_from(["finish", "switch"]))
    def use(self, number: int, mode: str) -> None:
        others = self.registry.others
        one = others[number % len(others)]
        self.call("PUT", f"/v1/adapters/{one.name}", body=_json({"version": one.version, "mode": mode}))

    @precondition(lambda self: self.registry.adapters)
    @rule(
        number=DICE,
        prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=3),
        length=st.integers(1, 24),
        is_streamed=st.booleans(),
        user=st.sampled_from([None, "ann", "bob"]),
        passes=PASSES,
    )
    def ask(
        self, number: int, prompts: list[Tokens], length: int, is_streamed: bool, user: str | None, passes: int
    ) -> None:
        labels = self.labels
        label = labels[number % len(labels)]
        body = {
            "model": label,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "user": user,
        }
        stream = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        named = self.registry.get(label)
        assert named
        for prompt in prompts:
            call = self.call("POST", "/v1/completions", body=_json({**body, **stream, "prompt": prompt}))
            self.asks.append(Ask(call, prompt, may_miss=not self.registry.has(named)))
        self.steps(passes)

    @precondition(lambda self: self.service.is_running)
    @rule(kind=st.sampled_from([*GOOD, *GOOD, RUINED]), kv=st.sampled_from(["recompute", "keep"]), passes=PASSES)
    def switch(self, kind: str, kv: str, passes: int) -> None:
        """In the middle of answers."""
        for one in self.registry.adapters:
            body = {"path": self.path(kind), "mode": "switch", "kv": kv}
            self.call("PUT", f"/v1/adapters/{one.name}", body=_json(body))
        self.steps(passes)

    @precondition(lambda self: self.registry.adapters)
    @rule(data=st.data(), number=DICE)
    def route(self, data: st.DataObject, number: int) -> None:
        name = self.registry.adapters[number % len(self.registry.adapters)].name
        places = st.sampled_from(range(len(self.labels)))
        targets = [self.labels[place] for place in data.draw(st.lists(places, min_size=1, max_size=3, unique=True))]
        weights = {target: 1 / len(targets) for target in targets}
        others = {key: self.labels[place] for key in ("rollback", "shadow") if (place := data.draw(st.none() | places))}
        self.call("PUT", f"/v1/adapters/{name}/route", body=_json({"targets": weights, **others}))

    @precondition(lambda self: self.app.state.context.traffic.routes)
    @rule(number=DICE)
    def end_route(self, number: int) -> None:
        routes = self.app.state.context.traffic.routes
        self.call("DELETE", f"/v1/adapters/{routes[number % len(routes)].name}/route")

    @precondition(lambda self: self.registry.adapters)
    @rule(number=DICE)
    def unload(self, number: int) -> None:
        self.call("DELETE", f"/v1/adapters/{self.labels[number % len(self.labels)]}")

    @precondition(lambda self: self.open)
    @rule(number=DICE)
    def leave(self, number: int) -> None:
        """A client is gone."""
        self.open[number % len(self.open)].leave()
        self.settle()

    @rule(passes=st.integers(1, 20))
    def steps(self, passes: int) -> None:
        for _ in range(passes):
            self.step()

    @rule(is_held=RARELY)
    def hold_reads(self, is_held: bool) -> None:
        """Reads and copies end, and the scheduler hears of it only later."""
        self.service.holds_reports = is_held

    @rule(kind=st.sampled_from(GOOD), is_there=st.booleans())
    def move_folder(self, kind: str, is_there: bool) -> None:
        """A folder is gone, or comes back; an engine may want to read it again."""
        here, away = Path(self.path(kind)), Path(f"{self.path(kind)}-away")
        if is_there and away.exists():
            away.rename(here)
        elif not is_there and here.exists():
            here.rename(away)

    @rule(count=st.integers(1, 2))
    def break_copies(self, count: int) -> None:
        self.failing_copies = count

    @precondition(lambda self: self.kills < 2)
    @rule(is_so=RARELY, at=st.sampled_from(["receive", "submit", "collect"]))
    def kill(self, is_so: bool, at: str) -> None:
        if not is_so:
            return
        self.kills += 1
        self.service.kill(at)

    # ── what stays true ──────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def every_refusal_has_a_sentence(self) -> None:
        for call in [one for one in self.calls if one.is_done]:
            self.calls.remove(call)
            call.task.result()
            if call.status >= 400 and not call.has_left:
                error = call.json()["error"]
                assert error["message"].endswith("."), error
                assert CODES.get(error["code"]) == call.status, error
                assert error["code"] != "engine_died" or self.kills

    @invariant()
    def every_answer_is_pefts(self) -> None:
        done = [one for one in self.asks if one.call.is_done]
        self.asks = [one for one in self.asks if not one.call.is_done]
        for one in done:
            if not one.call.has_left:
                self.judge.check(one)

    # ── the means ────────────────────────────────────────────────────────────────────────────────────────────────

    def path(self, kind: str) -> str:
        return str(Path(self.shelf.name, kind))

    @property
    def labels(self) -> list[str]:
        """Everything that a client may name."""
        versions = [one.label for name in NAMES for one in self.registry.versions(name)]
        return [*(one.name for one in self.registry.adapters), *versions]

    @property
    def open(self) -> list[Call]:
        return [call for call in self.calls if not call.is_done and not call.has_left]

    def call(self, method: str, path: str, **sent: Any) -> Call:
        call = Call(self.app, self.loop, method, path, **sent)
        self.calls.append(call)
        if sent.get("is_cut"):
            call.leave()
        self.settle()
        return call

    def step(self) -> None:
        self.service.step()
        self.settle()

    def settle(self) -> None:
        self.loop.run_until_complete(turns())

    def calm(self) -> None:
        """Until nothing is open."""
        self.service.calm()
        for _ in range(MOST_PASSES):
            if all(call.is_done for call in self.calls) and self.service.is_idle:
                return
            self.step()
        raise AssertionError([call.text for call in self.calls if not call.is_done])

    def teardown(self) -> None:
        try:
            self.failing_copies = 0
            self.calm()
            self.every_refusal_has_a_sentence()
            self.every_answer_is_pefts()
            for name in [one.name for one in self.registry.adapters]:
                assert self.call("DELETE", f"/v1/adapters/{name}") is not None
            self.calm()
            self.nothing_is_left()
        finally:
            self.loop.run_until_complete(self.lifespan.__aexit__(None, None, None))
            self.loop.close()
            tempfile.tempdir = self.tempdir
            self.spools.cleanup()
            self.shelf.cleanup()
        moved = {one.request_id for one in self.service.events if isinstance(one, Moved) and one.kept_kv}
        assert self.service.mixed <= moved, "KV of another version was read"

    def nothing_is_left(self) -> None:
        assert not [path for path in Path(self.spools.name).rglob("*") if path.is_file()], "files are left"
        assert not [*self.registry.adapters, *self.registry.others, *chain(*map(self.registry.coming, NAMES))]
        assert self.service.users == {BASE: 0}, "a version has users, or is not gone"
        assert not self.service.owes, "the next engine would be told of it"
        assert not self.app.state.context.traffic.routes
        assert not self.app.state.context.traffic.shadows._open, "a copy has no end"


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps({key: value for key, value in body.items() if value is not None}).encode()


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def brew(storm: type[Storm], examples: int, steps: int) -> None:
    """Without shrinking: a storm that fails is told at once, and `print_blob` says how to have the same again."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    chosen = settings(max_examples=examples, stateful_step_count=steps, phases=phases, print_blob=True)
    run_state_machine_as_test(storm, settings=chosen)
