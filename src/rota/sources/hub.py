"""The Hugging Face Hub: repositories at a revision, and folders below them.

HF_TOKEN and HF_ENDPOINT of the environment say who asks and where, as for all tools of the Hub.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import huggingface_hub
from huggingface_hub import errors, utils

from rota.sources.source import ChangedError, NothingError, SourceError, SourceFile, UnreachableError, refuse_size

# ── hub errors ──────────────────────────────────────────────────────────────────────────────────────────────────────
# What the Hub's library raises, as a sentence.
#
# Its own words hold addresses, which may be signed: the kind of an error goes to the log, its words go nowhere.

LOG = logging.getLogger("rota.sources")

# The HTTP library below the Hub's: httpx up to its version 1, httpx2 since.
_HTTP = importlib.import_module(type(utils.get_session()).__module__.partition(".")[0])
_MISSING = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError)
_OURS = (errors.HFValidationError, errors.HfHubHTTPError, _HTTP.HTTPError, OSError, ValueError, TypeError, KeyError)


@contextmanager
def told_of(where: str) -> Iterator[None]:
    """Raises SourceError for all that can go wrong between here and the Hub."""
    try:
        yield
    except SourceError:
        raise
    except _OURS as error:
        LOG.warning("The Hub could not be read.", extra={"fields": {"source": where, "why": type(error).__name__}})
        raise _error_for(where, error) from None


def _error_for(where: str, error: Exception) -> SourceError:
    if isinstance(error, errors.GatedRepoError):
        return SourceError(f"{where} is gated: its owner must let the server's HF_TOKEN in.")
    if isinstance(error, _MISSING):
        return NothingError(_missing(where))
    if isinstance(error, errors.HFValidationError):
        return NothingError(f"{where} names no repository: give hf://organisation/name.")
    if isinstance(error, errors.HfHubHTTPError):
        return _refused(where, int(error.response.status_code))
    if isinstance(error, _HTTP.TimeoutException):
        return UnreachableError(f"The Hub did not answer in time for {where}.")
    if isinstance(error, (_HTTP.HTTPError, OSError)):
        return UnreachableError(f"The Hub cannot be reached for {where}.")
    return SourceError(f"What the Hub says of {where} cannot be read.")


def _missing(where: str) -> str:
    """The Hub says the same of what is not there and of what is not shown."""
    if utils.get_token():
        return f"There is nothing at {where} that the server's HF_TOKEN may see."
    return f"There is nothing at {where} that everyone may see, and the server's environment has no HF_TOKEN."


def _refused(where: str, status: int) -> SourceError:
    if status in (401, 403):
        return SourceError(f"The Hub refuses the server's HF_TOKEN for {where}.")
    kind = UnreachableError if status == 429 or status >= 500 else SourceError
    return kind(f"The Hub answers with the status {status} for {where}.")


TIMEOUT_S = 20.0
COMMIT = "x-repo-commit"


class Hub:
    """Places are `org/name`, `org/name@revision`, and folders below: `org/name@revision/folder`."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None

    def files(self, place: str) -> Sequence[SourceFile]:
        repository, revision, folder = _parts(place)
        with told_of(f"hf://{place}"):
            # One call, because the listing of a tree has no time-out.
            api = huggingface_hub.HfApi(endpoint=self._endpoint)
            found = api.model_info(repository, revision=revision, files_metadata=True, timeout=self._timeout_s)
            inside = [one for one in found.siblings or [] if one.rfilename.rpartition("/")[0] == folder]
            if not inside:
                raise NothingError(f"There is nothing at hf://{place}.")
            return [_listed(one, str(found.sha)) for one in inside]

    def read(self, place: str, file: SourceFile, start: int, end: int | None = None) -> Iterator[bytes]:
        end = file.size if end is None else min(end, file.size)
        headers = {"range": f"bytes={start}-{end - 1}", "accept-encoding": "identity"}
        asked = utils.get_session().stream(
            "GET",
            self._url(place, file),
            headers={**utils.build_hf_headers(), **headers},
            timeout=self._timeout_s,
            follow_redirects=True,  # to where the bytes lie; the token stays behind
        )
        with told_of(f"hf://{place}"), asked as got:
            utils.hf_raise_for_status(got)
            _check(got, place, file, start)
            yield from got.iter_raw()  # as it comes: what is collected first would be lost with the connection

    def _url(self, place: str, file: SourceFile) -> str:
        repository, _, folder = _parts(place)
        name = f"{folder}/{file.name}" if folder else file.name
        return str(huggingface_hub.hf_hub_url(repository, name, revision=file.revision, endpoint=self._endpoint))


def _parts(place: str) -> tuple[str, str | None, str]:
    """Repository, revision, folder below."""
    organisation, _, rest = place.partition("/")
    name, _, folder = rest.partition("/")
    name, _, revision = name.partition("@")
    if not organisation or not name:
        raise NothingError(f"hf://{place} names no repository: give hf://organisation/name.")
    return f"{organisation}/{name}", revision or None, folder


def _listed(one: Any, commit: str) -> SourceFile:
    name, sha256 = one.rfilename.rpartition("/")[2], one.lfs.sha256 if one.lfs else ""
    return SourceFile(name=name, size=int(one.size), tag=str(one.blob_id), sha256=sha256, revision=commit)


def _check(got: Any, place: str, file: SourceFile, start: int) -> None:
    where = f"hf://{place}/{file.name}"
    if start and got.status_code == 200:
        raise SourceError(f"The Hub does not go on with {where} where it broke off.")
    whole = got.headers.get("content-range", "").rpartition("/")[2]
    if whole.isdecimal():
        refuse_size(f"hf://{place}", file, int(whole))
    commits = {one.headers[COMMIT] for one in (*got.history, got) if COMMIT in one.headers}
    if commits - {file.revision}:
        raise ChangedError(f"{where} changed while it was read; load it again.")
