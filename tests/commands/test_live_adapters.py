"""`rota adapters` at a running server: adapters come, change and go, and requests are sent elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from rota.cli import main
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.server.letters import letters_device, serving

Run = Callable[..., tuple[str, str, int]]
OPERATOR, ACME = Key("operator"), Key("acme", frozenset({"legal"}), may_load=False, may_operate=False)


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    keys = KeyRing({digest_of(key.name): key for key in (OPERATOR, ACME)})
    folder = tmp_path_factory.mktemp("letters")
    with serving(folder, letters_device(step_s=0.0), adapters=("legal", "new"), keys=keys) as client:
        client.headers["Authorization"] = "Bearer operator"
        yield client


@pytest.fixture
def run(client, monkeypatch, capsys) -> Run:
    """What `rota adapters` prints, and its exit code. The key comes by the environment."""
    monkeypatch.setenv("ROTA_API_KEY", "operator")

    def run(*arguments: str, url: str = "") -> tuple[str, str, int]:
        with pytest.raises(SystemExit) as ended:
            main(["adapters", *arguments, "--base-url", url or str(client.base_url)])
        out, err = capsys.readouterr()
        return out, err, int(ended.value.code or 0)

    return run


def names(client: httpx.Client) -> list[str]:
    return [model["id"] for model in client.get("/v1/models").json()["data"]]


def test_an_adapter_is_loaded(run, client):
    assert run("load", "owl", "/adapters/owl") == ("Adapter 'owl' is loaded.\n", "", 0)
    assert "owl" in names(client)

    _, err, code = run("load", "owl", "/adapters/owl")
    assert (err, code) == (
        "rota: An adapter named 'owl' is already loaded; unload it first, or take another name.\n",
        1,
    )
    assert run("load", "crow", "/adapters/broken")[1:] == ("rota: /adapters/broken is broken.\n", 1)


def test_an_adapter_gets_new_versions_and_goes(run, client):
    run("load", "heron", "/adapters/heron")
    assert run("update", "heron", "/adapters/two")[0] == "'heron' means version 2, and meant version 1 before.\n"
    assert run("update", "heron", "/adapters/three", "--stage")[0] == (
        "Version 3 of 'heron' is there: 'heron@3' asks for it.\n"
    )
    assert run("update", "heron", "--version", "3", "--keep-old")[0] == (
        "'heron' means version 3, and meant version 2 before.\n"
    )
    out, _, code = run("list")
    rows = [line.split() for line in out.splitlines()]
    assert ["heron", "3", "current", "/adapters/three"] in rows
    assert ["heron", "2", "kept", "/adapters/two"] in rows
    assert code == 0

    assert run("update", "heron", "/adapters/four", "--switch", "--keep-kv")[0] == (
        "'heron' means version 4, and meant version 3 before.\n"
    )
    assert run("unload", "heron@2") == ("'heron@2' is unloaded.\n", "", 0)
    assert run("unload", "heron") == ("'heron' is unloaded.\n", "", 0)
    assert "heron" not in names(client)
    assert run("unload", "heron")[1].startswith(
        "rota: No adapter or version named 'heron' is loaded; loaded are: legal"
    )


def test_a_list_is_sorted_by_number_and_comes_as_json_too(run):
    for name in ("team10", "team9"):
        run("load", name, f"/adapters/{name}")

    rows = [line.split()[0] for line in run("list")[0].splitlines() if "team" in line]
    assert rows == ["team9", "team10"]
    found = json.loads(run("list", "--json")[0])
    assert {"team9", "team10"} <= {one["name"] for one in found["adapters"]}
    assert found["routes"] == []
    for name in rows:
        run("unload", name)


def test_an_update_says_what_the_name_shall_mean(run):
    for arguments in (["legal"], ["legal", "/adapters/two", "--version", "1"]):
        _, err, code = run("update", *arguments)
        assert (err, code) == (
            "rota: Give either PATH, for a new version, or --version, for one that is there.\n",
            2,
        )
    _, err, code = run("update", "legal", "/adapters/two", "--stage", "--switch")
    assert (err.startswith("rota: --stage and --switch contradict each other"), code) == (True, 2)
    _, err, code = run("update", "legal", "/adapters/two", "--keep-kv")
    assert ("kv" in err, code) == (True, 1)
    assert run("update", "legal", "/adapters/broken")[1:] == ("rota: /adapters/broken is broken.\n", 1)


def test_requests_are_sent_to_several_targets_and_back_to_one(run, client):
    out, _, code = run("route", "legal", "legal=0.75", "new=0.25", "--shadow", "new@1", "--rollback", "legal")
    assert (out, code) == ("legal: 75.0% to legal (0), 25.0% to new (0); copies to new@1; rolls back to legal\n", 0)

    for _ in range(4):
        client.post("/v1/completions", json={"model": "legal", "prompt": "a", "max_tokens": 1}).raise_for_status()
    assert run("route", "legal")[0].startswith("legal: 75.0% to legal (3), 25.0% to new (1)")
    listed, _, _ = run("list")
    assert listed.splitlines()[-1].startswith("legal: 75.0% to legal (3), 25.0% to new (1)")
    assert run("route", "legal", "--end") == ("The route of 'legal' has ended: its requests go to 'legal'.\n", "", 0)
    assert run("route", "legal")[1:] == (
        "rota: No route is set for 'legal': its requests go to its current version.\n",
        1,
    )


@pytest.mark.parametrize(
    ("arguments", "sentence", "code"),
    [
        (["legal", "legal"], "'legal' is no target with a weight; write one as legal@7=0.95.", 2),
        (["legal", "legal=much"], "'legal=much' is no target with a weight; write one as legal@7=0.95.", 2),
        (["legal", "=1"], "'=1' is no target with a weight; write one as legal@7=0.95.", 2),
        (["legal", "new=0.5", "new=0.5"], "'new' is named twice.", 2),
        (["legal", "--shadow", "new"], "--shadow needs targets beside it, as in legal@1=0.9 legal@2=0.1.", 2),
        (["legal", "new=1", "--end"], "--end ends the route, so nothing else is said beside it.", 2),
        (["legal", "new=0.5"], "The weights in targets must sum to 1, not 0.5.", 1),
        (["owl/no", "new=1"], "No adapter named 'owl/no' is loaded; a route is set for a name that is.", 1),
    ],
)
def test_a_route_that_cannot_be_is_one_sentence(run, arguments, sentence, code):
    assert run("route", *arguments) == ("", f"rota: {sentence}\n", code)


def test_a_key_that_may_not_is_told_so(run):
    _, err, code = run("route", "legal", "new=1", "--api-key", "acme")

    assert (err, code) == ("rota: Key 'acme' may not load or unload; that needs may_load.\n", 1)


def test_a_server_that_is_not_there_is_one_sentence(run):
    _, err, code = run("route", "legal", url="http://127.0.0.1:9")

    assert code == 1
    assert err.startswith("rota: The server at http://127.0.0.1:9 cannot be reached, or has gone: ")
    assert err.count("\n") == 1
