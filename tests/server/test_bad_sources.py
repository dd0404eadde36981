"""Whatever is wrong with a source: a sentence, the old version serves on, and nothing is left behind on disk."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from rota.llm.config import build_device, engine_config
from rota.runtime.registry import Registry
from rota.server.adapters.manager import locating
from rota.sources.disk_cache import DiskCache
from rota.sources.download import Download
from rota.sources.hub import Hub
from rota.sources.object_store import ObjectStore
from rota.sources.prefix import Prefix
from rota.sources.source import Source
from rota.sources.sources import FIRST_BYTES, Locator, Sources
from rota.text.tokenizer import Tokenizer
from tests.engine.lora.adapter_factory import change_config, make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.server.applications import made_app, running
from tests.server.engines import REPLICAS, threads
from tests.server.letters import error_of
from tests.sources.hub_server import TOKEN, HubServer, hub_server
from tests.sources.s3_server import SECRET, S3Front, S3Server, s3_front, s3_server
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S

S3, HUB = "s3://adapters/tenants/legal", "hf://acme/legal"
# Of a listing that never comes; all others may be slow on a busy machine.
SHORT_S = 0.2


@dataclass
class Opened:
    """Opens sources, which wait for so long."""

    timeout_s: float = TIMEOUT_S

    def __call__(self, scheme: str) -> Source:
        return Hub(self.timeout_s) if scheme == "hf" else ObjectStore(scheme, self.timeout_s, self.timeout_s)


@dataclass
class Stage:
    """A server, its two sources, and where they would leave something."""

    disk: Path
    s3: S3Server
    front: S3Front
    hub: HubServer
    client: httpx.Client
    opened: Opened

    def files(self, made: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.disk / "made" / made).iterdir()}

    def publish(self, made: str, folder: str = "tenants/legal") -> None:
        """Put an adapter into both sources."""
        self.s3.put(folder, self.files(made))
        self.hub.put("acme/legal", self.files(made))

    def heal(self) -> None:
        self.opened.timeout_s = TIMEOUT_S
        self.front.heal()
        self.hub.heal()

    def ask(self, model: str) -> httpx.Response:
        body = {"model": model, "prompt": "ab", "max_tokens": 4, "temperature": 0.0}
        return self.client.post("/v1/completions", json=body)

    def answer(self, model: str = "legal") -> str:
        got = self.ask(model)
        assert got.status_code == 200, got.text
        return str(got.json()["choices"][0]["text"])

    def versions(self) -> list[int]:
        return [one["version"] for one in self.client.get("/v1/adapters/legal").json()["versions"]]

    def left(self) -> list[Path]:
        return sorted(path for folder in ("cache", "temporary") for path in (self.disk / folder).rglob("*"))


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Iterator[Stage]:
    pytest.importorskip("moto", reason="moto is not installed, which is the S3 server of these tests")
    pytest.importorskip("obstore", reason="obstore is not installed: the extra `stores`")
    disk = _disk(tmp_path_factory.mktemp("disk"))
    with ExitStack() as stack:
        s3, hub = stack.enter_context(s3_server()), stack.enter_context(hub_server())
        front = stack.enter_context(s3_front(s3.url))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {**s3.environment, "AWS_ENDPOINT_URL": front.url, "HF_ENDPOINT": hub.url}.items():
            patch.setenv(name, value)
        patch.delenv("HF_TOKEN", raising=False)
        patch.setattr("tempfile.tempdir", str(disk / "temporary"))
        opened = Opened()
        patch.setattr("rota.sources.download.PAUSE_S", 0.0)
        patch.setattr("rota.engine.build.sources_for", lambda *_: Sources(DiskCache(disk / "cache", 10**8), opened))
        url = stack.enter_context(_serving(disk, opened))
        client = stack.enter_context(httpx.Client(base_url=url))
        yield Stage(disk, s3, front, hub, client, opened)


def _disk(disk: Path) -> Path:
    """A model, adapters of it, and what looks like one."""
    (disk / "temporary").mkdir()
    model = make_tiny_model(write_byte_tokenizer(disk / "tiny"), "smollm2")
    for seed, name in enumerate(("old", "new", "large", "junk", "odd", "bare")):
        folder = make_adapter(disk / "made" / name, model, seed=seed, r=64 if name == "large" else 4)
        if name == "junk":
            (folder / "adapter_model.safetensors").write_bytes(b"no weights at all" * 10)
        if name == "odd":
            change_config(folder, peft_type="LOHA")
        if name == "bare":
            (folder / "adapter_config.json").unlink()
    return disk


def _serving(disk: Path, opened: Opened):
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 32, "max_running_requests": 2, "max_lora_rank": 8}
    options |= {"max_loras_per_batch": 1, "max_loaded_loras": 1}  # so that an adapter leaves when another is asked for
    options |= {"model_path": str(disk / "tiny"), "adapter_cache_dir": str(disk / "cache")}
    config = engine_config(options, quiet=True)
    registry = Registry("tiny", str(disk / "tiny"))
    locator = Locator(None, Sources(DiskCache(disk / "cache", 10**8), opened))
    lookup = {"locate": locating(locator), "prefix": Prefix("s3://adapters/tenants")}
    service = threads(partial(build_device, config), config)  # no node of a cluster has this process's credentials
    return running(made_app(service, Tokenizer(disk / "tiny"), registry, **lookup))


Fault = Callable[[Stage], object]


def lists_nothing(stage: Stage) -> None:
    stage.opened.timeout_s = SHORT_S
    stage.front.may_list.clear()
    stage.hub.may_answer.clear()


def reads_nothing(stage: Stage) -> None:
    stage.opened.timeout_s = SHORT_S
    stage.front.may_read.clear()
    stage.hub.may_answer.clear()


def refuses(stage: Stage) -> None:
    stage.front.status = 403
    stage.hub.gated.add("acme/legal")


def says_more(stage: Stage) -> None:
    stage.front.adds_bytes = 1
    stage.hub.says_size = len(stage.files("new")["adapter_model.safetensors"]) + 1


def says_less(stage: Stage) -> None:
    stage.front.adds_bytes = -1
    stage.hub.says_size = len(stage.files("new")["adapter_model.safetensors"]) - 1


def changes(stage: Stage) -> None:
    """After the server has listed it, and before the engine reads it."""
    stage.front.after_listing = stage.hub.after_listing = [lambda: stage.publish("old")]


def breaks_off(stage: Stage) -> None:
    stage.front.breaks, stage.hub.breaks = [0] * 100, [0] * 100


def fails(stage: Stage) -> None:
    stage.front.status = stage.hub.status = 501


def holds(made: str) -> Fault:
    def change(stage: Stage) -> None:
        httpx.post(f"{stage.s3.url}/moto-api/reset").raise_for_status()
        httpx.put(f"{stage.s3.url}/{stage.s3.bucket}").raise_for_status()
        stage.publish(made)

    return change


# What is wrong, the statuses, and what is said of a place in S3 and on the Hub.
TABLE = [
    (lists_nothing, 502, "did not answer in time", "did not answer in time"),
    (refuses, 400, "The store refuses the server's credentials for {where}.", "{where} is gated"),
    (says_more, 400, "bytes; its source listed", "bytes; its source listed"),
    (says_less, 400, "bytes; its source listed", "bytes; its source listed"),
    (changes, 400, "{where} holds something else than when it was loaded", "{where} holds something else than"),
    (breaks_off, 502, "The connection to the store of {where} breaks off.", "The Hub cannot be reached for {where}."),
    (fails, 502, "The store of {where} answers with the status 501.", "answers with the status 501 for {where}."),
    (holds("bare"), 400, "{where} is no adapter: it has no adapter_config.json.", "{where} is no adapter"),
    (holds("junk"), 400, "{where}/adapter_model.safetensors", "{where}/adapter_model.safetensors"),
    (holds("odd"), 400, "{where}/adapter_config.json describes a PEFT adapter of type 'LOHA'", "'LOHA'"),
    (holds("large"), 400, "rank", "rank"),
]


@pytest.mark.parametrize(("fault", "status", "s3_says", "hub_says"), TABLE)
def test_what_is_wrong_with_a_source_changes_nothing(stage: Stage, fault: Fault, status: int, s3_says, hub_says):
    _begin(stage)
    said, left, versions = stage.answer(), stage.left(), stage.versions()
    for where, words in ((S3, s3_says), (HUB, hub_says)):
        stage.publish("new")
        fault(stage)
        refused = stage.client.put("/v1/adapters/legal", json={"path": where})
        stage.heal()
        assert refused.status_code == status, refused.text
        assert words.format(where=where) in error_of(refused)["message"]
        assert not any(secret in refused.text for secret in (SECRET, TOKEN, "127.0.0.1", str(stage.disk)))
        assert stage.answer() == said
        assert stage.versions() == versions
        assert stage.left() == left
    stage.client.delete("/v1/adapters/legal").raise_for_status()


# The same of an adapter that is registered, and that the engine has to bring once more for a request.
AGAIN = [
    (lists_nothing, 502, "did not answer in time", "did not answer in time"),
    (reads_nothing, 502, "did not answer in time", "did not answer in time"),
    (breaks_off, 502, "The connection to the store of {where} breaks off.", "The Hub cannot be reached for {where}."),
    (fails, 502, "The store of {where} answers with the status 501.", "answers with the status 501 for {where}."),
    (refuses, 400, "The store refuses the server's credentials for {where}.", "{where} is gated"),
    (says_more, 400, "{where} holds something else than", "{where} holds something else than"),
    (holds("old"), 400, "{where} holds something else than when it was loaded", "{where} holds something else than"),
]


@pytest.mark.skipif(
    REPLICAS > 1,
    reason="of one engine: with replicas, another one may have the adapter in a slot, and nothing is brought again",
)
@pytest.mark.parametrize(("fault", "status", "s3_says", "hub_says"), AGAIN)
def test_what_is_wrong_with_a_source_ends_the_requests_of_an_adapter_that_is_read_again(
    stage: Stage, fault: Fault, status: int, s3_says, hub_says
):
    for where, words in ((S3, s3_says), (HUB, hub_says)):
        _begin(stage)
        stage.client.put("/v1/adapters/legal", json={"path": where}).raise_for_status()
        said = stage.answer()
        _forget(stage)
        fault(stage)
        refused = stage.ask("legal")
        stage.heal()
        stage.publish("new")
        assert refused.status_code == status, refused.text
        assert words.format(where=where) in error_of(refused)["message"]
        assert ("retry-after" in refused.headers) is (status == 502)
        assert not any(secret in refused.text for secret in (SECRET, TOKEN, "127.0.0.1", str(stage.disk)))
        assert stage.answer() == said, "the next request has it read once more"
        stage.client.delete("/v1/adapters/legal").raise_for_status()


def _forget(stage: Stage) -> None:
    """Another adapter takes the place in host memory, and the disk has no copy."""
    stage.client.put("/v1/adapters/poet", json={"path": str(stage.disk / "made" / "old")}).raise_for_status()
    stage.answer("poet")
    stage.client.delete("/v1/adapters/poet").raise_for_status()
    shutil.rmtree(stage.disk / "cache", ignore_errors=True)


def _begin(stage: Stage) -> None:
    """The name serves an adapter of a folder, and both sources have a newer one, which is not on the disk."""
    shutil.rmtree(stage.disk / "cache", ignore_errors=True)
    stage.publish("new")
    folder = str(stage.disk / "made" / "old")
    stage.client.put("/v1/adapters/legal", json={"path": folder}).raise_for_status()


def test_both_sources_serve_while_nothing_is_wrong(stage: Stage):
    _begin(stage)
    old = stage.answer()
    said = set()
    for where in (S3, HUB, "acme/legal"):
        stage.client.put("/v1/adapters/legal", json={"path": where}).raise_for_status()
        said.add(stage.answer())
    assert len(said) == 1
    assert old not in said
    stage.client.delete("/v1/adapters/legal").raise_for_status()


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (lists_nothing, 502, "Adapter 'first' could not be loaded: The store of first did not answer in time."),
        (refuses, 400, "The store refuses the server's credentials for first."),
        (says_more, 400, "Adapter 'first' could not be loaded: first/adapter_config.json has "),
        (holds("new"), 404, "There is no model or adapter named 'first'"),
    ],
)
def test_what_is_wrong_with_a_source_refuses_the_first_request(stage: Stage, fault: Fault, status: int, words: str):
    stage.publish("new", "tenants/first")
    fault(stage)
    refused = stage.client.post("/v1/completions", json={"model": "first", "prompt": "ab", "max_tokens": 1})
    stage.heal()
    assert (refused.status_code, error_of(refused)["param"]) == (status, "model")
    assert words in error_of(refused)["message"]
    assert "s3:" not in refused.text
    assert "first" not in [model["id"] for model in stage.client.get("/v1/models").json()["data"]]


def test_junk_is_refused_by_its_headers_before_it_is_downloaded(stage: Stage):
    _begin(stage)
    stage.client.put("/v1/adapters/legal", json={"path": S3}).raise_for_status()
    left = stage.left()
    good, junk = stage.files("new"), bytes([255]) * 5_000_000
    stage.s3.put("tenants/junk", {**good, "adapter_model.safetensors": junk})
    stage.front.reads.clear()
    refused = stage.client.put("/v1/adapters/rival", json={"path": "s3://adapters/tenants/junk"})
    asked = [tuple(map(int, one.removeprefix("bytes=").split("-"))) for one in stage.front.reads]

    assert refused.status_code == 400, refused.text
    assert "s3://adapters/tenants/junk/adapter_model.safetensors" in error_of(refused)["message"]
    # Each engine looks for itself.
    assert 0 < sum(last + 1 - first for first, last in asked) < 2 * FIRST_BYTES * REPLICAS
    assert stage.left() == left
    stage.client.delete("/v1/adapters/legal").raise_for_status()


def test_a_source_that_is_away_is_told_in_sglangs_shape_too(stage: Stage):
    stage.hub.status = 503
    refused = stage.client.post("/load_lora_adapter", json={"lora_name": "other", "lora_path": HUB})
    stage.hub.heal()
    assert (refused.status_code, refused.json()["success"]) == (502, False)
    assert refused.json()["error_message"] == f"The Hub answers with the status 503 for {HUB}."


def _has_no_room(_: Download, folder: Path) -> None:
    (folder / "half").write_bytes(b"of it")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_changes_nothing_and_the_next_load_may_find_room(stage: Stage, monkeypatch):
    _begin(stage)
    said, left, versions = stage.answer(), stage.left(), stage.versions()
    with monkeypatch.context() as patched:
        patched.setattr(Download, "into", _has_no_room)
        refused = stage.client.put("/v1/adapters/legal", json={"path": S3})
    _is_no_room(stage, refused)
    assert (stage.answer(), stage.versions()) == (said, versions)
    assert [path for path in stage.left() if path.is_file()] == left
    stage.client.put("/v1/adapters/legal", json={"path": S3}).raise_for_status()
    assert stage.answer() != said
    stage.client.delete("/v1/adapters/legal").raise_for_status()


@pytest.mark.skipif(
    REPLICAS > 1,
    reason="of one engine: with replicas, another one may have the adapter in a slot, and nothing is brought again",
)
def test_a_full_disk_ends_the_requests_of_an_adapter_that_is_read_again(stage: Stage, monkeypatch):
    _begin(stage)
    stage.client.put("/v1/adapters/legal", json={"path": S3}).raise_for_status()
    said = stage.answer()
    _forget(stage)
    with monkeypatch.context() as patched:
        patched.setattr(Download, "into", _has_no_room)
        _is_no_room(stage, stage.ask("legal"))
    assert stage.answer() == said, "the next request has it read once more"
    stage.client.delete("/v1/adapters/legal").raise_for_status()


def _is_no_room(stage: Stage, refused: httpx.Response) -> None:
    assert (refused.status_code, error_of(refused)["code"]) == (507, "disk_full"), refused.text
    assert error_of(refused)["message"].startswith(f"There is no room for the adapter in {stage.disk / 'cache'} (")
    assert "retry-after" not in refused.headers
