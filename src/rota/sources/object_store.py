"""Object stores: S3 and what speaks like it, Google's and Azure's, all through `obstore`.

Credentials come from the environment, as the stores' own tools take them: AWS_*, GOOGLE_*, AZURE_*.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any

from rota.core.errors import ConfigError
from rota.sources.source import ChangedError, NothingError, SourceError, SourceFile, refuse_size
from rota.sources.store_errors import error_for

CONNECT_S, IDLE_S = 5.0, 10.0
# Within both: no listing takes longer than the two idle times that it may have begun.
RETRIES, RETRY_S = 2, 10.0
# Of these the stores read their credentials and endpoints, once for each bucket.
ENVIRONMENTS = ("AWS_", "GOOGLE_", "AZURE_")
MOST_OPEN = 16
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
        self._connect_s, self._idle_s = connect_s, idle_s

    def files(self, place: str) -> Sequence[SourceFile]:
        bucket, _, path = place.partition("/")
        with self._told_of(place):
            found = self._library.list_with_delimiter(self._open(bucket), path or None)["objects"]
        if not found:
            raise NothingError(f"There is nothing at {self._scheme}://{place}.")
        return [SourceFile(name=one["path"].rpartition("/")[2], size=one["size"], tag=_tag(one)) for one in found]

    def read(self, place: str, file: SourceFile, start: int, end: int | None = None) -> Iterator[bytes]:
        stretch = (start, file.size if end is None else min(end, file.size))
        with self._told_of(place):
            bucket, _, path = f"{place}/{file.name}".partition("/")
            result = self._library.get(self._open(bucket), path, options={"range": stretch})
            if _tag(result.meta) != file.tag:
                raise ChangedError(f"{self._scheme}://{place}/{file.name} changed while it was read; load it again.")
            refuse_size(f"{self._scheme}://{place}", file, result.meta["size"])
            for piece in result.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    def _open(self, bucket: str) -> Any:
        told = tuple(sorted(one for one in os.environ.items() if one[0].startswith(ENVIRONMENTS)))
        return _opened(f"{self._scheme}://{bucket}", self._connect_s, self._idle_s, told)

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


@lru_cache(MOST_OPEN)
def _opened(url: str, connect_s: float, idle_s: float, environment: tuple[tuple[str, str], ...]) -> Any:
    """A bucket, opened once: that takes 8 ms, and connections that stand are used again."""
    import obstore

    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=connect_s),
        "read_timeout": timedelta(seconds=idle_s),
    }
    # Stores of one's own are often spoken to without TLS, in one's own network.
    if url.startswith("s3:") and dict(environment).get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
        options["allow_http"] = True
    retry = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)}
    return obstore.store.from_url(url, client_options=options, retry_config=retry)


def _tag(meta: Any) -> str:
    """Without a tag of its own, the moment of the last change stands for the content."""
    return str(meta.get("e_tag") or meta.get("version") or meta["last_modified"].isoformat())
