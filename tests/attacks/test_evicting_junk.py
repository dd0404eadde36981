"""Junk in a tenant's own part of a store: its load must not drive the neighbour's adapter from the shared disk."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.attacks.live import BUILT_IN, neighbour, serving

JUNK_BYTES = 69_000_000


@pytest.mark.long("a whole server starts, and a store; tests/server/test_bad_sources.py has the same with a tiny model")
def test_junk_drives_nobody_from_the_disk(tmp_path, monkeypatch, record_property):
    pytest.importorskip("moto", reason="moto is not installed, which is the S3 server of this test")
    pytest.importorskip("obstore", reason="obstore is not installed: rota[stores]")
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
