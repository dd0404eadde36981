"""Calls that give an adapter of a running server a new version, each with the moments of its begin and its end."""

from __future__ import annotations

import http.client
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import httpx
import torch
from safetensors.torch import load_file, save_file

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LIMIT_S = 120.0


@contextmanager
def in_memory(folder: Path, precision: str) -> Iterator[Path]:
    """Two copies of an adapter's folder that lie in memory, if the machine has a place for that, in this precision."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as place:
        for number in (0, 1):
            copy = Path(shutil.copytree(folder, Path(place) / str(number)))
            tensors = {name: each.to(getattr(torch, precision)) for name, each in load_file(copy / WEIGHTS).items()}
            save_file(tensors, copy / WEIGHTS)
        yield Path(place)


def update(client: httpx.Client, name: str, folder: Path) -> tuple[float, float]:
    """From the call until the name is switched."""
    begun_at = time.monotonic()
    client.put(f"/v1/adapters/{name}", json={"path": str(folder)}).raise_for_status()
    return begun_at, time.monotonic()


def send(client: httpx.Client, name: str, weights: bytes, config: str) -> tuple[float, float]:
    """With Python's own client: httpx copies what is left of a body for each of its parts, for seconds."""
    base, headers = client.base_url, {"content-type": "application/octet-stream"}
    connection = http.client.HTTPConnection(base.host, base.port or 80, timeout=LIMIT_S)
    begun_at = time.monotonic()
    connection.request("PUT", f"/v1/adapters/{name}?{urlencode({'config': config})}", weights, headers)
    told = connection.getresponse()
    ended_at, text = time.monotonic(), told.read()
    connection.close()
    assert told.status == 200, text
    return begun_at, ended_at


def first_token(client: httpx.Client, name: str) -> float:
    begun_at = time.monotonic()
    body = {"model": name, "prompt": [1, 2, 3], "max_tokens": 1}
    client.post("/v1/completions", json=body).raise_for_status()
    return time.monotonic() - begun_at
