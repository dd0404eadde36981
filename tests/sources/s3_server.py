"""An S3 server of moto's, in a thread of this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

SECRET = "wJalrXUtnFEMI"


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where it listens, and a bucket in it."""

    url: str
    bucket: str = "adapters"

    @property
    def environment(self) -> dict[str, str]:
        """What a client of it needs in its environment."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def put(self, folder: str, files: Mapping[str, bytes]) -> str:
        """Upload files, and give their address."""
        import obstore

        options = {name.lower(): value for name, value in self.environment.items() if name != "AWS_ALLOW_HTTP"}
        store = obstore.store.S3Store(self.bucket, config=options, client_options={"allow_http": True})
        for name, content in files.items():
            obstore.put(store, f"{folder}/{name}", content)
        return f"s3://{self.bucket}/{folder}"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        s3 = S3Server(f"http://{host}:{port}")
        httpx.put(f"{s3.url}/{s3.bucket}").raise_for_status()
        yield s3
    finally:
        server.stop()
