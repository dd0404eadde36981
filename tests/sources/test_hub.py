"""Adapters from a Hub that runs here, and what it says when things go wrong."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rota.core.lora_paths import LoraPath
from rota.sources.address import parse_address
from rota.sources.disk_cache import DiskCache
from rota.sources.hub import Hub
from rota.sources.source import ChangedError, NothingError, SourceError, UnreachableError
from rota.sources.sources import Locator, Sources
from tests.processes import run_program
from tests.sources.hub_server import TOKEN, HubServer
from tests.sources.shelf import adapter_files
from tests.waiting import TIMEOUT_S

WHERE = "hf://acme/legal"


def sources_in(folder: Path, timeout_s: float = TIMEOUT_S) -> Sources:
    return Sources(DiskCache(folder, 10**8), lambda _: Hub(timeout_s))


def content(folder: Path, where: str, timeout_s: float = TIMEOUT_S) -> dict[str, bytes]:
    with sources_in(folder, timeout_s).folder_of(parse_address(where)) as found:
        return {path.name: path.read_bytes() for path in found.iterdir() if not path.name.startswith(".")}


def refusal(folder: Path, where: str = WHERE, timeout_s: float = TIMEOUT_S) -> SourceError:
    """Says nothing of the endpoint and of tokens, and leaves nothing on the disk."""
    with pytest.raises(SourceError) as caught:
        content(folder, where, timeout_s)
    said = str(caught.value)
    assert TOKEN not in said
    assert "http:" not in said
    assert "127.0.0.1" not in said
    assert list(folder.rglob("*")) == []
    return caught.value


def test_an_adapter_comes_from_a_repository(hub: HubServer, tmp_path: Path):
    hub.put("acme/legal", {**adapter_files(), "README.md": b"read me", "old/adapter_config.json": b"{}"})
    assert content(tmp_path, WHERE) == adapter_files()
    assert content(tmp_path, "acme/legal") == adapter_files()
    assert hub.downloads() == [
        ("adapter_config.json", "bytes=0-7"),
        ("adapter_model.safetensors", "bytes=0-59"),
    ], "each file once, and no other"


def test_a_revision_and_a_folder_may_be_named(hub: HubServer, tmp_path: Path):
    hub.put("acme/legal", adapter_files("one"))
    best = {f"runs/best/{name}": content for name, content in adapter_files("ten").items()}
    commit = hub.put("acme/legal", {**adapter_files("two"), **best}, branch="v2")
    assert content(tmp_path, WHERE) == adapter_files("one")
    assert content(tmp_path, f"{WHERE}@v2") == adapter_files("two")
    assert content(tmp_path, f"{WHERE}@{commit}") == adapter_files("two")
    assert content(tmp_path, f"{WHERE}@v2/runs/best") == adapter_files("ten")


def test_the_token_goes_to_the_hub_and_not_to_where_it_sends_us(hub: HubServer, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.put("acme/legal", adapter_files())
    hub.private.add("acme/legal")
    assert content(tmp_path, WHERE) == adapter_files()
    sent = {path.split("/")[1] == "cdn": authorization for path, _, authorization in hub.asked}
    assert sent == {True: None, False: f"Bearer {TOKEN}"}


def test_a_connection_that_breaks_off_is_taken_up_where_it_ended(hub: HubServer, tmp_path: Path):
    hub.put("acme/legal", adapter_files())
    hub.breaks = [5, 3, 20]
    assert content(tmp_path, WHERE) == adapter_files()
    assert hub.downloads() == [
        ("adapter_config.json", "bytes=0-7"),
        ("adapter_config.json", "bytes=5-7"),
        ("adapter_model.safetensors", "bytes=0-59"),
        ("adapter_model.safetensors", "bytes=20-59"),
    ]


def test_a_hub_that_begins_anew_is_not_joined_to_what_came_before(hub: HubServer, tmp_path: Path):
    hub.put("acme/legal", adapter_files())
    hub.ignores_ranges = True
    assert content(tmp_path, WHERE) == adapter_files(), "whole answers are right at the start of a file"
    file = Hub().files("acme/legal")[1]
    with pytest.raises(SourceError, match="does not go on with hf://acme/legal/adapter_model"):
        list(Hub().read("acme/legal", file, 20))


def test_a_commit_that_changes_other_files_is_the_same_adapter(hub: HubServer, tmp_path: Path):
    hub.put("acme/legal", adapter_files())
    exact = sources_in(tmp_path).exact(parse_address(WHERE))
    hub.put("acme/legal", {**adapter_files(), "README.md": b"read me"})
    assert content(tmp_path, str(exact)) == adapter_files()
    hub.put("acme/legal", adapter_files("two"))
    with pytest.raises(ChangedError, match="hf://acme/legal holds something else than when it was loaded"):
        content(tmp_path / "other", str(exact))


def test_a_repository_that_changes_while_it_is_read_gives_what_was_listed(hub: HubServer):
    hub.put("acme/legal", adapter_files("one"))
    listed = Hub().files("acme/legal")
    hub.put("acme/legal", adapter_files("two"))
    assert b"".join(Hub().read("acme/legal", listed[1], 0)) == adapter_files("one")["adapter_model.safetensors"]


Fault = Callable[[HubServer], None]


def _private(hub: HubServer) -> None:
    hub.private.add("acme/legal")


def _gated(hub: HubServer) -> None:
    hub.gated.add("acme/legal")


def _says(**fields: object) -> Fault:
    def change(hub: HubServer) -> None:
        for name, value in fields.items():
            setattr(hub, name, value)

    return change


def _holds(files: dict[str, bytes]) -> Fault:
    def change(hub: HubServer) -> None:
        hub.put("acme/legal", files)

    return change


@pytest.mark.parametrize(
    ("fault", "kind", "sentence"),
    [
        (_private, NothingError, "There is nothing at hf://acme/legal that everyone may see, and the server's "),
        (_gated, SourceError, "hf://acme/legal is gated: its owner must let the server's HF_TOKEN in."),
        (_says(status=429), UnreachableError, "The Hub answers with the status 429 for hf://acme/legal."),
        (_says(status=503), UnreachableError, "The Hub answers with the status 503 for hf://acme/legal."),
        (_says(status=400), SourceError, "The Hub answers with the status 400 for hf://acme/legal."),
        (_says(status=200, body=b"<p>"), SourceError, "What the Hub says of hf://acme/legal cannot be read."),
        (_says(status=200, body=b"[]"), SourceError, "What the Hub says of hf://acme/legal cannot be read."),
        (_says(says_size=61), ChangedError, "hf://acme/legal/adapter_model.safetensors has 60 bytes; its source "),
        (_says(says_size=59), ChangedError, "hf://acme/legal/adapter_model.safetensors has 60 bytes; its source "),
        (_says(says_size=59, ignores_ranges=True), ChangedError, "acme/legal/adapter_model.safetensors is longer "),
        (_says(says_size=10**9), SourceError, "hf://acme/legal takes 954 MiB, more than the 95 MiB that the cache "),
        (_says(says_commit="0" * 40), ChangedError, "hf://acme/legal/adapter_config.json changed while it was read"),
        (_holds({"README.md": b""}), NothingError, "hf://acme/legal is no adapter: it has no adapter_config.json."),
        (_holds({"adapter_config.json": b"{}"}), SourceError, "hf://acme/legal has no adapter_model.safetensors; "),
        (_holds({}), NothingError, "There is nothing at hf://acme/legal."),
    ],
)
def test_what_goes_wrong_is_told_in_a_sentence(hub: HubServer, tmp_path: Path, fault: Fault, kind, sentence: str):
    hub.put("acme/legal", adapter_files())
    fault(hub)
    error = refusal(tmp_path)
    assert type(error) is kind
    assert str(error).startswith(sentence)


@pytest.mark.parametrize("where", ["hf://acme/none", f"{WHERE}@v9", f"{WHERE}/none", f"{WHERE}@main/none"])
def test_nothing_is_there(hub: HubServer, tmp_path: Path, where: str):
    hub.put("acme/legal", adapter_files())
    error = refusal(tmp_path, where)
    assert type(error) is NothingError
    assert str(error).startswith(f"There is nothing at {where}")


@pytest.mark.parametrize("where", ["hf://acme", "hf://acme/a--b", "hf://acme/@v2", "hf://acme/legal.git"])
@pytest.mark.usefixtures("hub")
def test_what_is_no_repository_is_said(tmp_path: Path, where: str):
    assert str(refusal(tmp_path, where)) == f"{where} names no repository: give hf://organisation/name."


def test_a_token_that_the_hub_does_not_know(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub.put("acme/legal", adapter_files())
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert str(refusal(tmp_path)) == "The Hub refuses the server's HF_TOKEN for hf://acme/legal."


def test_a_hub_that_never_answers(hub: HubServer, tmp_path: Path):
    hub.put("acme/legal", adapter_files())
    hub.may_answer.clear()
    error = refusal(tmp_path, timeout_s=0.1)
    assert type(error) is UnreachableError
    assert str(error) == "The Hub did not answer in time for hf://acme/legal."


def test_a_hub_that_nobody_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else gets it, and nobody listens
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        error = refusal(tmp_path)
    assert type(error) is UnreachableError
    assert str(error) == "The Hub cannot be reached for hf://acme/legal."


@pytest.mark.usefixtures("hub")
def test_a_bare_name_that_is_neither_a_folder_nor_a_repository(tmp_path: Path):
    with pytest.raises(NothingError) as caught:
        Locator(None, sources_in(tmp_path)).locate(LoraPath(name="a", path="acme/none"))
    said = str(caught.value)
    assert said.startswith("There is no adapter folder at acme/none, and as a name on the Hub: There is nothing at ")


def test_the_hub_needs_no_library_that_rota_does_not_bring(hub: HubServer):
    """The Hub's library brings an HTTP library of its own, another one in each of its versions."""
    hub.put("acme/legal", adapter_files())
    program = (
        "import sys, huggingface_hub.utils\n"
        "own = type(huggingface_hub.utils.get_session()).__module__\n"
        "sys.modules |= {name: None for name in ('httpx', 'httpx2') if name != own}\n"
        "from rota.sources.hub import Hub\n"
        "print([one.name for one in Hub().files('acme/legal')])"
    )
    said = run_program([sys.executable, "-c", program]).stdout
    assert said.strip() == "['adapter_config.json', 'adapter_model.safetensors']"
