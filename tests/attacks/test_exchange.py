"""Attack 5: a weights file that is exchanged with a link to another tenant's while it is loaded."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.attacks.live import WEIGHTS, Tenant, good_adapter, neighbour, serving

AT_CWD, EXCHANGE = -100, 2
LOADS = 60


@contextmanager
def exchanging(one: Path, other: Path) -> Iterator[None]:
    """Two names change places again and again while the block runs."""
    libc, is_over, has_begun = ctypes.CDLL(None, use_errno=True), threading.Event(), threading.Event()

    def work() -> None:
        while not is_over.is_set():
            assert libc.renameat2(AT_CWD, os.fsencode(one), AT_CWD, os.fsencode(other), EXCHANGE) == 0
            has_begun.set()

    worker = threading.Thread(target=work)
    worker.start()
    has_begun.wait()
    try:
        yield
    finally:
        is_over.set()
        worker.join()


def said_by(tenant: Tenant, model: str) -> str:
    body = {"model": model, "prompt": "What is the moon?", "max_tokens": 6, "temperature": 0}
    return tenant.client.post("/v1/completions", json=body).json()["choices"][0]["text"]


@pytest.mark.long("it loads an adapter sixty times in a whole server")
def test_no_load_gives_the_weights_behind_the_link(tmp_path, record_property):
    with serving(tmp_path) as server:
        acme, birds = server.acme, server.birds
        good_adapter(birds.root / "secret", "haiku")  # its config is the same
        mine = good_adapter(acme.root / "mine", "french")
        (acme.root / "link").symlink_to(f"../birds/secret/{WEIGHTS}")
        assert (acme.put("acme-mine", "mine").status_code, birds.put("birds-secret", "secret").status_code) == (
            200,
            200,
        )
        own, secret = said_by(acme, "acme-mine"), said_by(birds, "birds-secret")
        assert own != secret

        with neighbour(server) as gaps, exchanging(mine / WEIGHTS, acme.root / "link"):
            answers = []
            for _ in range(LOADS):
                loaded = acme.put("acme-mine", "mine")
                answers.append((loaded.status_code, said_by(acme, "acme-mine")))
        record_property("gaps", str(gaps))

        assert set(answers) <= {(200, own), (400, own)}
        assert len({status for status, _ in answers}) == 2, "the exchange was seen, and some loads came before it"
        assert not gaps.problems
