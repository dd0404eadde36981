"""Attacks 4, 5 and 12: files of an adapter are links, are exchanged with links, or are overwritten in place."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.attacks.live import BUILT_IN, WEIGHTS, Server, Tenant, good_adapter, neighbour, serving
from tests.processes import is_alive, started
from tests.waiting import line_of, until

# Attack 4: a name below `--lora-resolver` that is a link to another tenant's adapter, or holds one.


@pytest.mark.long("it starts a whole server")
def test_a_name_leads_to_no_other_tenants_adapter_and_every_load_has_its_line(tmp_path, record_property):
    with serving(tmp_path, "--lora-resolver", str(tmp_path / "root")) as server:
        acme, birds = server.acme.root, server.birds.root
        good_adapter(birds / "secret", "haiku")
        good_adapter(acme / "mine", "french")
        for name, target in {"link": "../birds/secret", "dangling": "../birds/nothing"}.items():
            (acme / name).symlink_to(target)
        for name, target in {"file": "secret", "no-file": "nothing"}.items():
            good_adapter(acme / name, "french")
            (acme / name / WEIGHTS).unlink()
            (acme / name / WEIGHTS).symlink_to(f"../../birds/{target}/{WEIGHTS}")

        with neighbour(server) as gaps:
            outside = {name: server.acme.ask(f"acme/{name}") for name in ("link", "dangling", "file", "no-file")}
            for_boss = [server.boss.ask(f"acme/{name}") for name in ("link", "file")]
            missing, mine = server.acme.ask("acme/nothing"), server.acme.ask("acme/mine")
        record_property("gaps", str(gaps))

        texts = {answer.text.replace(f"acme/{name}", "NAME") for name, answer in outside.items()}
        assert {answer.status_code for answer in outside.values()} == {400}
        assert len(texts) == 1, "what lies outside does not show"
        assert str(tmp_path) not in texts.pop()
        assert [answer.status_code for answer in for_boss] == [400, 400], "the links are acme's, whoever follows them"
        assert (missing.status_code, mine.status_code) == (404, 200)
        assert not gaps.problems

        lines = {line["adapter"]: (line["key"], line["outcome"] == "ok") for line in server.acts("load")}
        assert lines["acme/mine"] == ("acme", True)
        assert {lines[f"acme/{name}"][1] for name in outside} == {False}
        assert "acme/nothing" not in lines


# Attack 5: a weights file that is exchanged with a link to another tenant's while it is loaded.

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


# Attack 12: the files of a version are overwritten in place, and read again by the same engine and by the next one.

# One adapter fits into host memory: the next one takes its place.
SMALL = ("--max-loras-per-batch", "1", "--max-loaded-loras", "1")


def changed(name: str, version: int) -> str:
    return f"'{name}' changed since version {version} was loaded; PUT it again."


def overwrite(folder: Path) -> None:
    """With other weights of the same shapes, in the same file, whose times are those that it had."""
    path = folder / WEIGHTS
    before = path.stat()
    with path.open("r+b") as file, (BUILT_IN / "haiku" / WEIGHTS).open("rb") as other:
        shutil.copyfileobj(other, file)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def loaded(server: Server, folder: str, name: str, again: int = 0) -> None:
    """An adapter that has answered, in a version of its own."""
    good_adapter(server.acme.root / folder, "french")
    for _ in range(1 + again):
        assert server.acme.put(name, folder).status_code == 200
    assert server.acme.ask(name).status_code == 200


def refused(answer: httpx.Response, name: str, version: int) -> bool:
    error = answer.json().get("error", {})
    return (
        answer.status_code == 409 and error["code"] == "adapter_changed" and changed(name, version) in error["message"]
    )


@pytest.mark.long("it starts a whole server and an engine more")
def test_a_version_that_is_read_again_is_the_same_or_is_refused(tmp_path, record_property):
    with serving(tmp_path, *SMALL) as server:
        loaded(server, "mine", "acme-mine", again=2)
        with neighbour(server) as gaps:
            assert server.acme.ask("pirate").status_code == 200  # takes its place
            overwrite(server.acme.root / "mine")
            answers = [server.acme.ask("acme-mine") for _ in range(2)]
        record_property("gaps", str(gaps))
        assert all(refused(answer, "acme-mine", 3) for answer in answers), [one.text for one in answers]
        assert not gaps.problems
        put = server.acme.put("acme-mine", "mine")
        assert (put.status_code, put.json()["version"]) == (200, 4)
        assert server.acme.ask("acme-mine").status_code == 200

        loaded(server, "second", "acme-second")
        overwrite(server.acme.root / "second")
        (engine,) = server.boss.client.get("/server_info").json()["replicas"]
        os.kill(engine["pid"], signal.SIGKILL)
        assert until(lambda: not is_alive(engine["pid"]))
        assert until(lambda: server.acme.ask("pirate").status_code == 200)
        assert refused(server.acme.ask("acme-second"), "acme-second", 1)
        assert server.acme.ask("acme-mine").status_code == 200, "the others are what they were"


@pytest.mark.long("it starts a whole server")
def test_with_the_flag_the_new_files_are_a_new_version(tmp_path):
    with serving(tmp_path, *SMALL, "--reload-changed") as server:
        loaded(server, "mine", "acme-mine")
        assert server.acme.ask("pirate").status_code == 200
        overwrite(server.acme.root / "mine")

        assert server.acme.ask("acme-mine").status_code == 409
        assert until(lambda: server.acme.ask("acme-mine").status_code == 200)
        assert server.acme.ask("acme-mine").headers["x-rota-adapter-version"] == "2"
        assert [line["outcome"] for line in server.acts("update") if line.get("reloaded")] == ["ok"]
