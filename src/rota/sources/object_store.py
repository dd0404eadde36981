"""Object stores: S3 and what speaks like it, Google's and Azure's, all through `obstore`.

Credentials come from the environment, as the stores' own tools take them: AWS_*, GOOGLE_*, AZURE_*.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rota.core.errors import ConfigError
from rota.sources.source import ChangedError, SourceError, SourceFile

CONNECT_S, IDLE_S = "5s", "20s"
RETRIES = 2
PIECE_BYTES = 4 << 20


class ObjectStore:
    """Places are `bucket/path`; Azure's are `account/container/path`."""

    def __init__(self, scheme: str) -> None:
        try:
            import obstore
        except ImportError:
            raise ConfigError(f"{scheme}:// needs obstore: pip install 'rota[stores]'.") from None
        self._library: Any = obstore
        self._scheme = scheme

    def files(self, place: str) -> Sequence[SourceFile]:
        with self._told_of(place):
            found = self._library.list_with_delimiter(self._at(place))["objects"]
        if not found:
            raise SourceError(f"There is nothing at {self._scheme}://{place}.")
        return [SourceFile(name=one["path"], size=one["size"], tag=_tag(one)) for one in found]

    def read(self, place: str, file: SourceFile, start: int) -> Iterator[bytes]:
        with self._told_of(place):
            result = self._library.get(self._at(place), file.name, options={"range": {"offset": start}})
            if _tag(result.meta) != file.tag:
                raise ChangedError(f"{self._scheme}://{place}/{file.name} changed while it was read; load it again.")
            for piece in result.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    def _at(self, place: str) -> Any:
        options = {"connect_timeout": CONNECT_S, "timeout": None, "read_timeout": IDLE_S}
        # Stores of one's own are often spoken to without TLS, in one's own network.
        if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true") and self._scheme == "s3":
            options["allow_http"] = True
        return self._library.store.from_url(
            f"{self._scheme}://{place}",
            client_options={name: value for name, value in options.items() if value is not None},
            retry_config={"max_retries": RETRIES},
        )

    @contextmanager
    def _told_of(self, place: str) -> Iterator[None]:
        """A store's errors as sentences; the store's own words may hold its address, and stay out of them."""
        errors, where = self._library.exceptions, f"{self._scheme}://{place}"
        try:
            yield
        except errors.NotFoundError:
            raise SourceError(f"There is nothing at {where}.") from None
        except (errors.UnauthenticatedError, errors.PermissionDeniedError):
            raise SourceError(f"The store refuses the server's credentials for {where}.") from None
        except errors.PreconditionError:
            raise ChangedError(f"{where} changed while it was read; load it again.") from None
        except errors.BaseError as error:
            raise SourceError(f"{where} could not be read: {_first_line(error)}.") from error


def _tag(meta: Any) -> str:
    """Without a tag of its own, the moment of the last change stands for the content."""
    return str(meta.get("e_tag") or meta.get("version") or meta["last_modified"].isoformat())


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")[:200]
