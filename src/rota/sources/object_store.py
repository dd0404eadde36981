"""Object stores: S3 and what speaks like it, Google's and Azure's, all through `obstore`.

Credentials come from the environment, as the stores' own tools take them: AWS_*, GOOGLE_*, AZURE_*.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any

from rota.core.errors import ConfigError
from rota.core.version import how_to_install
from rota.sources.source import ChangedError, NothingError, SourceError, SourceFile, UnreachableError, refuse_size

# ── store errors ────────────────────────────────────────────────────────────────────────────────────────────────────
# What a store's library says of an error, as a sentence without endpoints and secrets.
#
# The library's own words hold the address of the endpoint, and may hold what was sent there: their first line goes to
# the log alone.

LOG = logging.getLogger("rota.sources")

_NO_CREDENTIALS = "The server's environment has no credentials for {where}."
_REFUSED = "The store refuses the server's credentials for {where}."
_NO_TLS = "The store of {where} has no TLS, which AWS_ALLOW_HTTP=true in the server's environment would allow."
_AWAY = (
    (r"kind: Timeout|TimedOut", "The store of {where} did not answer in time."),
    (r"kind: Connect", "The store of {where} cannot be reached."),
    (r"kind: Interrupted", "The connection to the store of {where} breaks off."),
    (r"\bstatus: (?P<status>5\d\d|429)\b", "The store of {where} answers with the status {status}."),
)
_NOTHING = ((r"\bstatus: 404\b", "There is nothing at {where}."),)
# What the words have in them, and what is said instead; the first that fits. Where a machine of a cloud has no
# credentials in its environment, the library asks the cloud's own service for them.
_SENTENCES = (
    (r"(GET|PUT) http://(169\.254\.169\.254|metadata\.google\.internal)", _NO_CREDENTIALS),
    (r"BadScheme", _NO_TLS),
    (r"\bstatus: 40[13]\b", _REFUSED),
    (r"\bstatus: (?P<status>\d+)", "The store of {where} answers with the status {status}."),
)


def error_for(where: str, words: str) -> SourceError:
    first = words.strip().partition("\n")[0]
    LOG.warning("A store could not be read.", extra={"fields": {"source": where, "why": first[:500]}})
    for kind, sentences in ((UnreachableError, _AWAY), (NothingError, _NOTHING), (SourceError, _SENTENCES)):
        for pattern, sentence in sentences:
            if found := re.search(pattern, words):
                return kind(sentence.format(where=where, **found.groupdict()))
    return SourceError(f"{where} could not be read; the server's log says why.")


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
            raise ConfigError(f"{scheme}:// needs obstore: {how_to_install('stores')}.") from None
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
