"""The Hugging Face Hub: repositories at a revision, and folders below them. Tokens come from HF_TOKEN."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import huggingface_hub
from huggingface_hub import errors

from rota.sources.source import NothingError, SourceError, SourceFile, UnreachableError

LOG = logging.getLogger("rota.sources")

TIMEOUT_S = 20.0
PIECE_BYTES = 1 << 20


class Hub:
    """Places are `org/name`, `org/name@revision`, and folders below: `org/name@revision/folder`."""

    def files(self, place: str) -> Sequence[SourceFile]:
        repository, revision, folder = _parts(place)
        with _told_of(place):
            api = huggingface_hub.HfApi()
            commit = api.model_info(repository, revision=revision, timeout=TIMEOUT_S).sha
            tree = api.list_repo_tree(repository, folder or None, revision=commit, recursive=False)
            return [_listed(one, folder, str(commit)) for one in tree if hasattr(one, "size")]

    def read(self, place: str, file: SourceFile, start: int, end: int | None = None) -> Iterator[bytes]:
        url, headers = _request(place, file, start, file.size if end is None else min(end, file.size))
        asked = httpx.stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True)
        with _told_of(place), asked as got:
            if got.status_code == httpx.codes.OK and start:
                raise SourceError(f"The Hub does not go on with {place}/{file.name} where it broke off.")
            got.raise_for_status()
            yield from got.iter_bytes(PIECE_BYTES)


def _request(place: str, file: SourceFile, start: int, end: int) -> tuple[str, dict[str, str]]:
    repository, _, folder = _parts(place)
    commit = file.tag.split(":")[0]  # what a commit holds never changes
    name = f"{folder}/{file.name}" if folder else file.name
    headers = {"range": f"bytes={start}-{end - 1}", "accept-encoding": "identity"}
    return huggingface_hub.hf_hub_url(repository, name, revision=commit), {
        **huggingface_hub.utils.build_hf_headers(),
        **headers,
    }


def _parts(place: str) -> tuple[str, str | None, str]:
    """Repository, revision, folder below."""
    organisation, _, rest = place.partition("/")
    name, _, folder = rest.partition("/")
    name, _, revision = name.partition("@")
    if not organisation or not name:
        raise NothingError(f"hf://{place} names no repository: give hf://organisation/name.")
    return f"{organisation}/{name}", revision or None, folder


def _listed(one: Any, folder: str, commit: str) -> SourceFile:
    name = one.path.removeprefix(f"{folder}/") if folder else one.path
    return SourceFile(name=name, size=one.size, tag=f"{commit}:{one.blob_id}", sha256=one.lfs.sha256 if one.lfs else "")


@contextmanager
def _told_of(place: str) -> Iterator[None]:
    """The Hub's errors as sentences; its own words hold addresses, which may be signed, and go to the log alone."""
    where = f"hf://{place}"
    try:
        yield
    except errors.GatedRepoError:
        raise SourceError(f"{where} is gated: its owner must let the server's HF_TOKEN in.") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError):
        raise NothingError(f"There is nothing at {where} that the server's HF_TOKEN may see.") from None
    except httpx.TimeoutException:
        raise UnreachableError(f"The Hub did not answer in time for {where}.") from None
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        LOG.warning("The Hub could not be read.", extra={"fields": {"source": where, "why": type(error).__name__}})
        raise UnreachableError(
            f"{where} could not be read; the Hub cannot be reached, or refuses the server."
        ) from None
