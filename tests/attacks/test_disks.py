"""What lies on disks: junk of one tenant beside others' adapters, and a copy of the model that was spoiled."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rota.engine.folders.builtin import builtin_model_folder
from rota.engine.quantised.names import GROUPS_FILE
from tests.attacks.live import BUILT_IN, neighbour, serving

# Junk in a tenant's own part of a store: its load must not drive the neighbour's adapter from the shared disk.

JUNK_BYTES = 69_000_000


@pytest.mark.long("a whole server starts, and a store; tests/server/test_bad_sources.py has the same with a tiny model")
def test_junk_drives_nobody_from_the_disk(tmp_path, monkeypatch, record_property):
    pytest.importorskip("moto", reason="moto is not installed, which is the S3 server of this test")
    pytest.importorskip("obstore", reason="obstore is not installed: the extra `stores`")
    from tests.sources.s3_server import s3_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    files = {path.name: path.read_bytes() for path in (BUILT_IN / "pirate").iterdir()}
    good = len(files["adapter_model.safetensors"])
    cache = tmp_path / "cache"
    # Room for either of them, and not for both.
    room = f"{(JUNK_BYTES + good // 2) / 1e9:.4f}"
    with s3_server() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.put("birds/pirate", files)
        store.put("acme/junk", {**files, "adapter_model.safetensors": b"\xff" * JUNK_BYTES})
        flags = ("--adapter-root", f"s3://{store.bucket}", "--adapter-cache-dir", str(cache))
        with serving(tmp_path, *flags, "--adapter-cache-gb", room) as server:
            server.birds.put("birds-own", "pirate").raise_for_status()
            kept = _kept(cache)
            with neighbour(server) as gaps:
                refused = server.acme.put("acme-junk", "junk")
            record_property("gaps", str(gaps))

            assert refused.status_code == 400, refused.text
            assert _kept(cache) == kept
            assert kept
            assert server.birds.ask("birds-own").status_code == 200
            assert not gaps.problems


def _kept(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


# Zeros in the weights of the unpacked built-in model, far behind their beginning, as a bad disk may leave them.

ZEROS = 20 << 20


@pytest.mark.long("the built-in model is unpacked twice, and a whole server starts")
def test_a_spoiled_copy_of_the_model_is_made_anew_and_not_served(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = builtin_model_folder(quiet=True) / GROUPS_FILE
    whole = weights.read_bytes()
    with weights.open("r+b") as file:
        file.seek(len(whole) // 4)
        file.write(bytes(ZEROS))

    with serving(tmp_path) as server:
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0.0}
        answer = server.boss.client.post("/v1/completions", json=body)

    assert "Paris" in answer.json()["choices"][0]["text"]
    assert weights.read_bytes() == whole
