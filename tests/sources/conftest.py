"""One S3 server for all tests of sources, and a Hub for each test that asks one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources.hub_server import HubServer, hub_server
from tests.sources.s3_server import S3Server, s3_server


@pytest.fixture(autouse=True, scope="package")
def _certificates_are_few() -> Iterator[None]:
    """Without TLS nobody needs them, and to read all of a machine's takes longer than to read an adapter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(Path(__file__).parents[1] / "server" / "certificates" / "first.crt"))
        yield


@pytest.fixture(scope="session")
def only_s3() -> Iterator[S3Server]:
    pytest.importorskip("moto", reason="moto is not installed, which is the S3 server of these tests")
    pytest.importorskip("obstore", reason="obstore is not installed: the extra `stores`")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(only_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in only_s3.environment.items():
        monkeypatch.setenv(name, value)
    return only_s3


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server
