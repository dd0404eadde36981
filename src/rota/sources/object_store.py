"""Object stores: S3 and what speaks like it, Google's and Azure's, all through `obstore`.

Credentials come from the environment, as the stores' own tools take them: AWS_*, GOOGLE_*, AZURE_*.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rota.core.errors import ConfigError
from rota.sources.source import ChangedError, NothingError, SourceError, SourceFile, refuse_size
from rota.sources.store_errors import error_for

CONNECT_S, IDLE_S = 5.0, 10.0
# Within both: no listing takes longer than the two idle times that it may have begun.
RETRIES, RETRY_S = 2, 10.0
# Written as it comes: less than a piece is lost with a connection that breaks off.
PIECE_BYTES = 256 << 10


class ObjectStore:
    """Places are `bucket/path`. Azure's are `container/path`; the account is the environment's."""

    def __init__(self, scheme: str, connect_s: float = CONNECT_S, idle_s: float = IDLE_S) -> None:
        try:
            import obstore
        except ImportError:
            raise ConfigError(f"{scheme}:// needs obstore: pip install 'rota[stores]'.") from None
        self._library: Any = obstore
        self._scheme = scheme
        self._timeouts = {"connect_timeout": timedelta(seconds=connect_s), "read_timeout": timedelta(seconds=idle_s)}

    def files(self, place: str) -> Sequence[SourceFile]:
        with self._told_of(place):
            found = self._library.list_with_delimiter(self._at(place))["objects"]
        if not found:
            raise NothingError(f"There is nothing at {self._scheme}://{place}.")
        return [SourceFile(name=one["path"], size=one["size"], tag=_tag(one)) for one in found]

    def read(self, place: str, file: SourceFile, start: int, end: int | None = None) -> Iterator[bytes]:
        stretch = (start, file.size if end is None else min(end, file.size))
        with self._told_of(place):
            result = self._library.get(self._at(place), file.name, options={"range": stretch})
            if _tag(result.meta) != file.tag:
                raise ChangedError(f"{self._scheme}://{place}/{file.name} changed while it was read; load it again.")
            refuse_size(f"{self._scheme}://{place}", file, result.meta["size"])
            for piece in result.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    def _at(self, place: str) -> Any:
        options: dict[str, Any] = dict(self._timeouts)
        # Stores of one's own are often spoken to without TLS, in one's own network.
        if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true") and self._scheme == "s3":
            options["allow_http"] = True
        retry = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)}
        return self._library.store.from_url(f"{self._scheme}://{place}", client_options=options, retry_config=retry)

    @contextmanager
    def _told_of(self, place: str) -> Iterator[None]:
        """A store's errors as sentences."""
        errors, where = self._library.exceptions, f"{self._scheme}://{place}"
        try:
            yield
        except errors.NotFoundError:
            raise NothingError(f"There is nothing at {where}.") from None
        except (errors.UnauthenticatedError, errors.PermissionDeniedError):
            raise SourceError(f"The store refuses the server's credentials for {where}.") from None
        except errors.PreconditionError:
            raise ChangedError(f"{where} changed while it was read; load it again.") from None
        except errors.BaseError as error:
            raise error_for(where, str(error)) from None


def _tag(meta: Any) -> str:
    """Without a tag of its own, the moment of the last change stands for the content."""
    return str(meta.get("e_tag") or meta.get("version") or meta["last_modified"].isoformat())
