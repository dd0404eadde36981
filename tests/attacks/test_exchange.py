"""Attack 5: a weights file that is exchanged with a link to another tenant's while it is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.attacks.live import WEIGHTS, Tenant, good_adapter, neighbour, serving
from tests.processes import started
from tests.waiting import line_of

LOADS = 150
# A process of its own: it must be as quick as the server.
EXCHANGES = """
import ctypes, os, sys
libc, (one, other), here, exchange = ctypes.CDLL(None), map(os.fsencode, sys.argv[1:]), -100, 2
print("begun", flush=True)
while libc.renameat2(here, one, here, other, exchange) == 0:
    pass
"""


@contextmanager
def exchanging(one: Path, other: Path) -> Iterator[None]:
    """Two names change places again and again while the block runs."""
    with started([sys.executable, "-c", EXCHANGES, one, other]) as program:
        line_of(program, "begun")
        yield
        assert program.poll() is None


def said_by(tenant: Tenant, model: str) -> str:
    body = {"model": model, "prompt": "What is the moon?", "max_tokens": 3, "temperature": 0}
    return str(tenant.client.post("/v1/completions", json=body).json()["choices"][0]["text"])


@pytest.mark.long("it loads an adapter 150 times in a whole server")
def test_no_load_gives_the_weights_behind_the_link(tmp_path, record_property):
    with serving(tmp_path) as server:
        acme, birds = server.acme, server.birds
        good_adapter(birds.root / "secret", "haiku")  # its config is the same
        mine = good_adapter(acme.root / "mine", "french")
        (mine / "link").symlink_to(f"../../birds/secret/{WEIGHTS}")
        assert acme.put("acme-mine", "mine").status_code == 200
        assert birds.put("birds-secret", "secret").status_code == 200
        own, secret = said_by(acme, "acme-mine"), said_by(birds, "birds-secret")
        assert own != secret

        with neighbour(server) as gaps, exchanging(mine / WEIGHTS, mine / "link"):
            statuses, said = set[int](), set[str]()
            for _ in range(LOADS):
                statuses.add(status := acme.put("acme-mine", "mine").status_code)
                if status == 200:
                    said.add(said_by(acme, "acme-mine"))
        record_property("gaps", str(gaps))

        assert statuses == {200, 400}, "some loads met the link, and some the file"
        assert said == {own}
        assert not gaps.problems
