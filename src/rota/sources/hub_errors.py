"""What the Hub's library raises, as a sentence.

Its own words hold addresses, which may be signed: the kind of an error goes to the log, its words go nowhere.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import errors, utils

from rota.sources.source import NothingError, SourceError, UnreachableError

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
