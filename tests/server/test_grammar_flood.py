"""Clients that send nothing but grammars of the worst kind: they are answered in time, and nobody else waits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from benchmarks.grammar_flood import HOSTILE, flooded
from rota.runtime.registry import Registry
from rota.server.app import create_app
from rota.server.grammar_checks.checks import GrammarChecks
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice, alphabet
from tests.server.engines import engines
from tests.server.running import running
from tests.server.test_large_bodies import Pulse
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import PATIENCE_S, until

# Of processor time: one check in the event loop's or the engine's thread takes longer, and so does the start of a
# process there. A busy machine does not change it.
LATE_S = 0.25


class Speaker:
    """Says the alphabet, and knows for how long the engine's thread worked between two tokens."""

    def __init__(self) -> None:
        self.longest_s, self._last = 0.0, float("inf")

    def __call__(self, tokens: Sequence[int]) -> int:
        now = time.thread_time()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now
        return alphabet(tokens)


@pytest.mark.usefixtures("frozen_heap")
def test_a_flood_of_hostile_grammars_holds_up_neither_the_event_loop_nor_the_engine(tmp_path: Path):
    speaker, registry = Speaker(), Registry("letters", "/models/letters")
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path))
    service = engines(lambda: FakeDevice(next_token=speaker), replicas=1)
    pulse = Pulse(create_app(service, tokenizer, registry, grammars=GrammarChecks(tmp_path)))
    with (
        running(pulse) as url,  # type: ignore[arg-type]
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        service.wait_until_ready()
        client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a"}).raise_for_status()
        with flooded(url, clients=2) as answers:
            while len(answers) < 2 * len(HOSTILE):
                count = len(answers)
                client.post("/v1/completions", json={"prompt": "a", "max_tokens": 60}).raise_for_status()
                assert until(lambda: len(answers) > count)  # noqa: B023

    assert {status for status, _ in answers} == {200, 400}
    assert max(pulse.longest_s, speaker.longest_s) < LATE_S
