"""A key file that changes while the server runs: new keys, removed keys, other rights, and files that are wrong."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.dashboard.feed import Feed
from rota.dashboard.routes import Viewers, routes_of
from rota.runtime.registry import Registry
from rota.server.access import key_file
from rota.server.access.access import Access
from rota.server.access.key_file import KeySource
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice
from tests.server.applications import made_app, running
from tests.server.engines import engines
from tests.server.letters import Gate
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import until

GATE = Gate()


class Keys:
    """A key file, the server that reads it, and a client."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.client: httpx.Client
        self.source: KeySource

    def write(self, *tables: str) -> None:
        """Puts a new file in place of the old one, as a careful operator does."""
        text = "\n".join(f"[keys.{table}\nmay_use_base = true" for table in tables)
        self.put(text)

    def put(self, text: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o600)
        os.replace(new, self.file)

    def ask(self, key: str, **fields: Any) -> httpx.Response:
        body = {"prompt": "abc", "max_tokens": 2, **fields}
        return self.client.post("/v1/completions", json=body, headers={"x-api-key": key})

    def status(self, key: str) -> int:
        return self.client.get("/v1/models", headers={"x-api-key": key}).status_code


@pytest.fixture
def keys(tmp_path, caplog) -> Iterator[Keys]:
    """A server with the keys acme and beta, which looks at its key file a hundred times a second."""
    caplog.set_level(logging.INFO, "rota.audit")
    GATE.clear()
    keys = Keys(tmp_path / "keys.toml")
    keys.write(ACME, BETA)
    keys.source = KeySource(["master"], str(keys.file))
    registry = Registry("letters", "/models/letters")
    access = Access(registry, keys.source.read(), now=lambda: 0.0)
    service = engines(lambda: FakeDevice(next_token=GATE))
    watch = partial(keys.source.watch, access.replace_keys, every_s=0.01)
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path))
    feed = Feed(registry, lambda: service.state)
    page = routes_of(Viewers(feed, service.send))
    app = made_app(service, tokenizer, registry, access=access, service_tasks=[watch], more_routes=page)
    with running(app) as url, httpx.Client(base_url=url) as keys.client:
        service.wait_until_ready()
        yield keys
        GATE.set()


ACME = 'acme]\nkey = "sk-acme"'
BETA = 'beta]\nkey = "sk-beta"\nrequests_per_minute = 2'


def fields_of(caplog, action: str = "change_keys") -> list[dict[str, Any]]:
    found = [record.fields for record in caplog.records if record.name == "rota.audit"]
    return [fields for fields in found if fields["action"] == action]


def test_a_new_key_is_known_and_a_removed_one_refused_soon_after_the_file_changes(keys, caplog):
    assert (keys.status("sk-acme"), keys.status("sk-new")) == (200, 401)
    keys.write(BETA, 'gamma]\nkey = "sk-new"')

    assert until(lambda: keys.status("sk-new") == 200)
    assert (keys.status("sk-acme"), keys.status("sk-beta"), keys.status("master")) == (401, 200, 200)
    assert until(lambda: len(fields_of(caplog)) == 1)
    assert fields_of(caplog) == [
        {
            "action": "change_keys",
            "cause": "the key file changed",
            "added": ["gamma"],
            "removed": ["acme"],
            "changed": [],
            "outcome": "ok",
        }
    ]


@pytest.mark.parametrize("how", ["in place", "another file", "a link"])
def test_a_change_is_seen_however_the_file_is_written(keys, how):
    text = keys.file.read_text() + '\n[keys.gamma]\nkey = "sk-new"'
    if how == "in place":
        keys.file.write_text(text)
    elif how == "another file":
        keys.put(text)
    else:
        keys.put(text)
        moved = keys.file.rename(keys.file.with_name("mounted.toml"))
        keys.file.symlink_to(moved)

    assert until(lambda: keys.status("sk-new") == 200)


def test_a_secret_that_is_replaced_is_a_change_and_is_never_logged(keys, caplog):
    keys.write(BETA, 'acme]\nkey = "sk-other"')

    assert until(lambda: keys.status("sk-other") == 200)
    assert keys.status("sk-acme") == 401
    assert until(lambda: len(fields_of(caplog)) == 1)
    assert fields_of(caplog)[0]["changed"] == ["acme"]
    logged = str([record.__dict__ for record in caplog.records if record.name == "rota.audit"])
    assert ("sk-acme" in logged, "sk-other" in logged) == (False, False)


def test_a_request_of_a_removed_key_goes_on_to_its_end(keys):
    body = {"prompt": "abc", "max_tokens": 9, "stream": True}
    with keys.client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "sk-acme"}) as stream:
        lines = stream.iter_lines()
        next(lines)
        keys.write(BETA)
        assert until(lambda: keys.status("sk-acme") == 401)
        GATE.set()
        assert list(lines)[-2] == "data: [DONE]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[keys", "is not TOML"),
        ("[keys.acme]\nmay_load = true", "needs either key or key_sha256"),
        ('[keys.acme]\nkey = "sk-acme"\nmay_load = true', "add the line adapter_root"),
        ('[keys.acme]\nkey = "master"', "have the same key"),
        ("", "there are no keys"),
        ("a = " + "[" * 100_000, "is not TOML"),
        (f'[keys.acme]\nkey = "sk-acme"\npriority = {"1" * 5000}', "is not TOML"),
    ],
)
def test_a_file_that_is_wrong_is_told_in_one_line_and_the_old_keys_stay(keys, caplog, text, words):
    keys.put(text)
    assert until(lambda: len(fields_of(caplog)) == 1)
    assert (keys.status("sk-acme"), keys.status("sk-beta")) == (200, 200)

    (refused,) = [record for record in caplog.records if record.name == "rota.audit"]
    assert (refused.levelname, words in refused.fields["outcome"]) == ("WARNING", True)
    assert refused.getMessage() == "The key file was read again and is not used; the old keys stay."
    keys.write(ACME)
    assert until(lambda: keys.status("sk-beta") == 401), "the next good file is taken"
    assert keys.status("sk-acme") == 200


def test_a_file_that_is_gone_is_told_once_and_the_old_keys_stay(keys, caplog):
    keys.file.unlink()
    assert until(lambda: len(fields_of(caplog)) == 1)
    assert "Cannot read the key file" in fields_of(caplog)[0]["outcome"]

    keys.write(BETA)
    assert until(lambda: keys.status("sk-acme") == 401)
    assert until(lambda: len(fields_of(caplog)) == 2)


def test_what_a_key_has_spent_stays_spent_also_if_its_limits_change(keys):
    assert [keys.ask("sk-beta").status_code for _ in range(3)] == [200, 200, 429]
    keys.write(ACME, BETA + "\npriority = 1", 'gamma]\nkey = "sk-new"')
    assert until(lambda: keys.status("sk-new") == 200)

    assert keys.ask("sk-beta").status_code == 429
    keys.write(ACME, BETA.replace("2", "3"))
    assert until(lambda: keys.status("sk-new") == 401)
    assert keys.ask("sk-beta").status_code == 429


def test_a_key_that_goes_and_comes_back_has_not_earned_new_limits(keys):
    assert [keys.ask("sk-beta").status_code for _ in range(3)] == [200, 200, 429]
    keys.write(ACME)
    assert until(lambda: keys.status("sk-beta") == 401)
    keys.write(ACME, BETA)
    assert until(lambda: keys.status("sk-beta") == 200)

    assert keys.ask("sk-beta").status_code == 429


def test_a_key_with_other_rights_still_ends_the_calls_it_has_open(keys):
    body = {"prompt": "abc", "max_tokens": 9, "stream": True}
    with keys.client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "sk-acme"}) as stream:
        lines = stream.iter_lines()  # kept: a stream whose reader is gone is closed
        next(lines)
        keys.write(ACME + "\nweight = 2.0", 'gamma]\nkey = "sk-new"')
        assert until(lambda: keys.status("sk-new") == 200)
        ended = keys.client.post("/abort_request", json={"abort_all": True}, headers={"x-api-key": "sk-acme"})
        GATE.set()

    assert ended.json() == {"aborted": 1}


def test_a_dashboard_whose_key_is_removed_gets_no_more_frames(keys):
    keys.write(ACME, 'eye]\nkey = "sk-eye"\nmay_operate = true')
    assert until(lambda: keys.status("sk-eye") == 200)
    with keys.client.stream("GET", "/dashboard/events", headers={"x-api-key": "sk-eye"}) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        keys.write(ACME)
        for _ in lines:
            pass  # it ends

    assert keys.client.get("/dashboard/events", headers={"x-api-key": "sk-eye"}).status_code == 401


def test_a_file_that_is_asked_for_is_read_although_it_is_the_same(keys, caplog):
    keys.source.ask()

    assert until(lambda: len(fields_of(caplog)) == 1)
    told = fields_of(caplog)[0]
    assert (told["cause"], told["added"], told["removed"], told["changed"]) == ("SIGHUP", [], [], [])
    assert keys.status("sk-acme") == 200


def test_a_file_that_is_written_while_it_is_read_is_read_again(keys, caplog, monkeypatch):
    """What was read may be half a file, which is a file without the last keys."""
    read, whole = key_file.read_keys, keys.file.read_text()

    def read_half(*given: Any) -> Any:
        ring = read(*given)
        if keys.file.read_text() != whole:
            keys.put(whole)
        return ring

    monkeypatch.setattr(key_file, "read_keys", read_half)
    keys.write(ACME)
    assert until(lambda: keys.file.read_text() == whole)
    keys.source.ask()
    assert until(lambda: "SIGHUP" in [one["cause"] for one in fields_of(caplog)])
    assert {name for one in fields_of(caplog) for name in one["removed"]} == set()
    assert keys.status("sk-beta") == 200
