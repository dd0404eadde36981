"""Attack 12: the files of a version are overwritten in place, and read again by the same engine and by the next one."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest

from tests.attacks.live import BUILT_IN, WEIGHTS, Server, good_adapter, neighbour, serving
from tests.processes import is_alive
from tests.waiting import until

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
