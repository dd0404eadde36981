"""Weights come in bodies, are read in pieces, and leave nothing behind that is not served."""

from __future__ import annotations

import base64
import errno
import json
import os
import pickle
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from rota.core.adapter import Adapter
from rota.core.config import ServerConfig
from rota.core.errors import RequestError
from rota.core.messages import AdapterFailed, Message
from rota.runtime.spool import FOLDER, PREFIX, Spool
from rota.server.access.disclosure import reason_for
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.adapters import upload
from rota.server.adapters.upload import PIECE, WEIGHTS_FILE, TensorsFields, read_tensors, write_tensors
from rota.server.answers.respond import VERSION_HEADER
from rota.server.calls.fields import read_body
from tests.server.letters import error_of, serving
from tests.server.versions.serving import CONFIG, SlowDevice, ask, put, send, versions, weights
from tests.waiting import until

ACME = Key("acme", frozenset({"acme-*"}), may_operate=False)
MUTE = Key("mute", may_load=False, may_operate=False)
RING = KeyRing({digest_of(f"sk-{key.name}"): key for key in (Key("operator"), ACME, MUTE)})


@pytest.fixture
def spools(tmp_path, monkeypatch) -> Path:
    """Where the server makes its spool."""
    folder = tmp_path / "spools"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def device() -> SlowDevice:
    return SlowDevice()


@pytest.fixture
def client(tmp_path, spools, device) -> Iterator[httpx.Client]:
    config = ServerConfig(max_body_mb=1, max_adapter_body_mb=2)
    with serving(tmp_path, device, config, keys=RING, adapters=("poet",)) as client:
        client.headers["x-api-key"] = "sk-operator"
        yield client
    assert not list(spools.iterdir()), "the server left its spool behind"


def files(spools: Path) -> list[Path]:
    """Not by `rglob`, which fails if a folder goes while it looks."""
    return sorted(Path(folder, name) for folder, _, names in os.walk(spools) for name in names)


def test_a_version_comes_in_a_body_and_its_files_go_with_it(client, spools, device):
    assert send(client, "poet", weights(), config=CONFIG).json()["current"] == 2
    assert ask(client, "poet").headers[VERSION_HEADER] == "2"
    (spool,) = spools.iterdir()
    assert stat.S_IMODE(spool.stat().st_mode) == 0o700
    config, saved = files(spools)
    assert (json.loads(config.read_text()), saved.read_bytes()) == (json.loads(CONFIG), weights())
    read = [one for plan in device.plans for one in plan.reads][-1]
    assert (read.path, read.root) == (str(saved.parent), str(spool))
    assert client.get("/v1/adapters/poet").json()["versions"][0]["path"] is None

    assert put(client, "poet").json()["current"] == 3
    assert until(lambda: not files(spools)), "the files of a version that left are still there"


@pytest.mark.parametrize(
    ("body", "query", "status", "words"),
    [
        (
            b"no weights at all",
            {"config": CONFIG},
            400,
            "no safetensors: they do not begin with the length of a header",
        ),
        (b"", {"config": CONFIG}, 400, "no safetensors"),
        (weights(), {"config": "[]"}, 400, "config must be adapter_config.json as a JSON object"),
        (weights(), {"config": "[" * 20_000}, 400, "config must be adapter_config.json as a JSON object"),
        (weights(), {"config": CONFIG, "mode": "jump"}, 400, "mode"),
        (weights(), {"config": CONFIG, "keep_old": "perhaps"}, 400, "keep_old"),
        (weights(), {"config": CONFIG, "rank": "8"}, 400, "'rank' is not a field"),
        (weights(size=3 << 20), {"config": CONFIG}, 413, "larger than 2 MB, the limit set by --max-adapter-body-mb"),
    ],
)
def test_a_body_that_cannot_be_is_refused_and_leaves_nothing(client, spools, body, query, status, words):
    refused = send(client, "poet", body, **query)

    assert (refused.status_code, words in error_of(refused)["message"]) == (status, True)
    assert versions(client, "poet") == {1: "current"}
    assert not files(spools)


def test_a_body_may_be_larger_than_others(client, spools):
    large = weights(size=3 << 19)
    assert send(client, "poet", large, config=CONFIG).status_code == 200
    assert files(spools)[1].read_bytes() == large
    other = client.put("/v1/adapters/poet", json={"path": "a" * (3 << 19)})
    assert (other.status_code, "--max-body-mb" in error_of(other)["message"]) == (413, True)


def test_weights_that_the_engine_refuses_leave_nothing_and_no_path_is_told(client, spools, monkeypatch):
    monkeypatch.setattr(SlowDevice, "fetch", lambda _, adapter: _failed(adapter))
    refused = send(client, "poet", weights(), config=CONFIG)

    assert (refused.status_code, error_of(refused)["message"]) == (400, "adapter_model.safetensors is no good.")
    assert versions(client, "poet") == {1: "current"}
    assert until(lambda: not files(spools))


def _failed(adapter: Adapter) -> Message:
    return AdapterFailed(
        adapter_id=adapter.adapter_id, at=0.0, reason=f"{adapter.path}/adapter_model.safetensors is no good."
    )


def test_a_request_that_waits_for_a_bad_body_is_told_no_path_either(client, device, monkeypatch):
    monkeypatch.setattr(SlowDevice, "fetch", lambda _, adapter: _failed(adapter))
    with ThreadPoolExecutor() as clients, device.holding():
        load = clients.submit(send, client, "owl", weights(), config=CONFIG)
        assert until(lambda: "owl" in [one["id"] for one in client.get("/v1/models").json()["data"]])
        asked = clients.submit(ask, client, "owl", request_id="waiting")
        assert until(lambda: client.get("/v1/requests/waiting").status_code == 200)
        device.read()

        for refused in (load.result(), asked.result()):
            assert (refused.status_code, error_of(refused)["message"]) == (400, "adapter_model.safetensors is no good.")


@pytest.mark.parametrize("length", [100_000, 1_000_000])  # the event loop reads the rest, or a thread
def test_a_client_that_leaves_in_the_middle_leaves_nothing(client, spools, length):
    address = urlsplit(str(client.base_url))
    head = (
        "PUT /v1/adapters/poet?config=%7B%7D HTTP/1.1\r\nHost: x\r\nx-api-key: sk-operator\r\n"
        f"content-type: application/octet-stream\r\nContent-Length: {length}\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + weights()[:50])
        assert until(lambda: files(spools)), "the body is not being written"
    assert until(lambda: not files(spools)), "half a body is still there"
    assert versions(client, "poet") == {1: "current"}


@pytest.mark.parametrize("size", [64, 1 << 20])  # the event loop reads the body, or a thread
def test_a_disk_without_room_is_told_and_the_old_version_serves_on(client, spools, monkeypatch, size):
    def without_room(spool: Spool) -> Path:
        folder = new_folder(spool)
        (folder / WEIGHTS_FILE).symlink_to("/dev/full")
        return folder

    new_folder = Spool.new_folder
    with monkeypatch.context() as patched:
        patched.setattr(Spool, "new_folder", without_room)
        refused = send(client, "poet", weights(size=size), config=CONFIG)
    assert (refused.status_code, error_of(refused)["code"]) == (507, "disk_full")
    assert error_of(refused)["message"] == no_room(str(spools))
    assert (versions(client, "poet"), ask(client, "poet").headers[VERSION_HEADER]) == ({1: "current"}, "1")
    assert not files(spools)
    assert send(client, "poet", weights(size=size), config=CONFIG).json()["current"] == 2


def no_room(place: str, why: str = "No space left on device") -> str:
    remedy = "start the server with TMPDIR on another"
    return f"There is no room for the adapter in {place} ({why}). Free some of that disk, or {remedy}."


# What writes: the folder, the weights of a body, its config, and the weights in base64.
WRITES = [
    "tempfile.mkdtemp",
    "rota.server.adapters.upload._write_last",
    "pathlib.Path.write_text",
    "rota.server.adapters.upload._decode",
]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("write", WRITES)
def test_whichever_write_finds_no_room_both_shapes_say_so_and_nothing_is_left(
    client, spools, monkeypatch, write, number
):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    expected = no_room(str(spools), os.strerror(number))
    with monkeypatch.context() as patched:
        patched.setattr(write, fail)
        sent, loaded = send(client, "poet", weights(), config=CONFIG), load_tensors(client, weights())
    if write.endswith("._decode"):
        assert sent.status_code == 200
    else:
        assert (sent.status_code, error_of(sent)["message"]) == (507, expected)
    assert (loaded.status_code, loaded.json()["success"]) == (507, False)
    assert loaded.json()["error_message"] == expected
    assert until(lambda: list(versions(client, "poet").values()) == ["current"])
    assert len(files(spools)) == (2 if sent.is_success else 0)
    assert ask(client, "poet").status_code == 200


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES])
def test_a_disk_that_fails_otherwise_is_the_servers_fault_too(client, spools, monkeypatch, number):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr("rota.server.adapters.upload._write_last", fail)
        refused, loaded = send(client, "poet", weights(), config=CONFIG), load_tensors(client, weights())
    assert (refused.status_code, error_of(refused)["code"], loaded.status_code) == (500, "disk_failed", 500)
    assert (
        error_of(refused)["message"]
        == loaded.json()["error_message"]
        == (
            f"The adapter cannot be written to {spools} ({os.strerror(number)}). "
            "Look after that disk, or start the server with TMPDIR on another."
        )
    )
    assert (versions(client, "poet"), ask(client, "poet").headers[VERSION_HEADER]) == ({1: "current"}, "1")
    assert not files(spools)


def test_only_an_operator_is_told_which_folder_is_full(client, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rota.server.adapters.upload._write_last", fail)
    client.headers["x-api-key"] = "sk-acme"
    sent, loaded = send(client, "acme-owl", weights(), config=CONFIG), load_tensors(client, weights(), "acme-owl")
    assert (sent.status_code, loaded.status_code) == (507, 507)
    assert error_of(sent)["message"] == loaded.json()["error_message"] == no_room("(a path)")


def test_a_key_without_a_folder_sends_weights_for_its_own_names_only(client):
    def send_as(key: str, name: str) -> httpx.Response:
        client.headers["x-api-key"] = f"sk-{key}"
        return send(client, name, weights(), config=CONFIG)

    assert send_as("acme", "acme-owl").status_code == 200
    assert send_as("acme", "acme-owl").json()["version"] == 2
    assert [send_as(*who).status_code for who in (("acme", "poet"), ("mute", "acme-owl"))] == [403, 403]
    assert send_as("operator", "acme-owl").json()["version"] == 3
    assert send_as("acme", "acme-owl").json()["version"] == 4  # it is still acme's own


def test_sglangs_shape_takes_safetensors_and_no_pickle(client, spools):
    assert load_tensors(client, weights()).json()["success"]
    assert ask(client, "poet").headers[VERSION_HEADER] == "2"
    refused = load_tensors(client, pickle.dumps({"weights": b"0" * 5000}))
    assert (refused.status_code, "holds a pickle, which can run code" in error_of(refused)["message"]) == (400, True)
    assert error_of(refused)["param"] == "serialized_tensors"
    assert len(files(spools)) == 2


def load_tensors(client: httpx.Client, raw: bytes, name: str = "poet") -> httpx.Response:
    text = base64.b64encode(raw).decode()
    body = {"lora_name": name, "config_dict": json.loads(CONFIG), "serialized_tensors": text}
    return client.post("/load_lora_adapter_from_tensors", json=body)


def test_multipart_is_refused_with_what_to_send(client):
    refused = client.put("/v1/adapters/poet", files={"weights": weights()})
    assert "send the safetensors as the whole body" in error_of(refused)["message"]


def test_a_new_server_removes_what_a_killed_one_left_and_no_other(tmp_path):
    left, other = tmp_path / f"{PREFIX}left", tmp_path / "other"
    for folder in (left, other):
        folder.mkdir()
        (folder / "file").touch()
    living = Spool(tmp_path)
    living.new_folder()
    spool = Spool(tmp_path)
    spool.new_folder()

    assert sorted(tmp_path.iterdir()) == sorted([other, living.root, spool.root])
    living.close()
    spool.close()
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize("place", [f"/tmp/{PREFIX}ab_12/{FOLDER}x_3", f"{FOLDER}x_3"])
def test_no_reason_names_the_folder_that_a_body_was_written_to(place):
    for key in (Key("operator"), ACME):
        assert reason_for(key, f"{place}/adapter_model.safetensors has no tensors.") == (
            "adapter_model.safetensors has no tensors."
        )
        assert reason_for(key, f"{place} is gone.") == "The body is gone."
        assert (
            reason_for(key, f"It was not read from '{place}' (OSError).")
            == "It was not read from 'the body' (OSError)."
        )


# ── SGLang's bodies ───────────────────────────────────────────────────────────────────────────────────────────────────

TEXT = base64.b64encode(bytes(range(256))).decode()
BODY = {"lora_name": "poet", "config_dict": {"r": 8}, "serialized_tensors": TEXT}
WRITTEN = json.dumps(BODY)


@pytest.mark.parametrize(
    "raw",
    [
        WRITTEN,
        json.dumps(dict(reversed(BODY.items()))),
        json.dumps(BODY, indent=2),
        WRITTEN.replace('"serialized_tensors": ', '"serialized_tensors" :\n'),
        json.dumps(BODY, separators=(",", ":")),
        WRITTEN.replace("/", r"\/"),
        WRITTEN.replace('{"r": 8}', '{"serialized_tensors": "inner"}'),
        WRITTEN.replace("poet", "serialized_tensors"),
        WRITTEN.replace("poet", r"\"serialized_tensors\""),
        WRITTEN.replace('{"lora', '{"serialized_tensors": "first", "lora'),
        WRITTEN.replace(TEXT, ""),
    ],
)
def test_however_a_body_is_written_its_fields_and_its_text_are_those_of_a_parser(raw):
    expected = read_body(TensorsFields, raw.encode())
    fields, text = read_tensors(raw.encode())

    assert bytes(text).decode() == expected.serialized_tensors
    assert fields.model_copy(update={"serialized_tensors": ""}) == expected.model_copy(
        update={"serialized_tensors": ""}
    )


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "no JSON",
        WRITTEN[:-1],
        WRITTEN[:-2],
        '{"serialized_tensors"',
        '{"serialized_tensors": "',
        json.dumps({**BODY, "serialized_tensors": None}),
        json.dumps({**BODY, "serialized_tensors": 7, "rid": "a"}),
        json.dumps({**BODY, "extra": 1}),
        json.dumps({"lora_name": "poet", "config_dict": {"serialized_tensors": TEXT}}),
        json.dumps({"lora_name": "poet", "serialized_tensors": TEXT}),
    ],
)
def test_a_body_that_a_parser_refuses_is_refused_for_the_same_field(raw):
    with pytest.raises(RequestError) as expected:
        read_body(TensorsFields, raw.encode())
    with pytest.raises(RequestError) as refused:
        read_tensors(raw.encode())
    assert refused.value.fault.param == expected.value.fault.param


def test_the_parser_gets_the_body_without_the_weights(monkeypatch):
    seen = []
    monkeypatch.setattr(upload, "read_body", lambda kind, raw: seen.append(len(raw)) or read_body(kind, raw))
    text = "A" * 3 * PIECE
    _, found = read_tensors(json.dumps({**BODY, "serialized_tensors": text}).encode())

    assert len(found) == len(text)
    assert seen == [len(WRITTEN) - len(TEXT)]


@pytest.mark.parametrize("size", [64, PIECE // 4 * 3 - 100, 3 * PIECE, 3 * PIECE + 4])
def test_weights_are_decoded_whatever_their_size(tmp_path: Path, size):
    content = weights(size=size)
    assert write_tensors(tmp_path, memoryview(base64.b64encode(content)), {}) == len(content)
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == content


@pytest.mark.parametrize(
    "text",
    [
        "no base64",
        "AAA",
        "A===",
        "A" * (PIECE - 4) + "AA==" + "AAAA",  # which ends at the border of two pieces
        "A" * PIECE + "A",
        "A" * PIECE + "AA\n==",
    ],
)
def test_what_is_no_base64_is_refused_by_the_name_of_its_field(tmp_path: Path, text):
    with pytest.raises(RequestError, match="serialized_tensors must be safetensors in base64"):
        write_tensors(tmp_path, memoryview(text.encode()), {})
