"""An address says where an adapter lies outside of this machine: `s3://bucket/legal`, `hf://org/name@v2`, `org/name`.

An exact address ends in `#` and a digest of the tags of its files: it names one content, whatever lies there later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rota.core.errors import AdapterError

STORES = ("s3", "gs", "az")
HUB = "hf"
_WITH_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<place>[^#]*)(#(?P<digest>[0-9a-f]+))?")
# What an address on the web gives another meaning, or writes in two ways.
_ODD = re.compile(r"[\\%?]")
# As the Hub names its repositories.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Address:
    """A place of a source."""

    scheme: str
    place: str
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}" + (f"#{self.digest}" if self.digest else "")

    @property
    def plain(self) -> Address:
        """The same place, whatever lies there."""
        return self.with_digest("")

    def with_digest(self, digest: str) -> Address:
        return replace(self, digest=digest)

    def lies_in(self, root: Address) -> bool:
        """Is it the place of a root, or below it?"""
        if self.scheme != root.scheme:
            return False
        return self.place == root.place or self.place.startswith(root.place.rstrip("/") + "/")


def has_scheme(path: str) -> bool:
    return _WITH_SCHEME.fullmatch(path) is not None


def is_repository(path: str) -> bool:
    """Could this be a repository of the Hub? A folder may have the same name."""
    return _REPOSITORY.fullmatch(path) is not None


def parse_address(path: str) -> Address:
    """Raises AdapterError for an address that no source has."""
    if is_repository(path):
        return Address(HUB, path)
    found = _WITH_SCHEME.fullmatch(path)
    if found is None:
        raise AdapterError(f"'{path}' is no address of an adapter.")
    scheme, place = found["scheme"], found["place"].strip("/")
    if scheme not in (*STORES, HUB):
        known = ", ".join(f"{one}://" for one in (*STORES, HUB))
        raise AdapterError(f"Rota knows no source '{scheme}://'; it reads folders, and {known}.")
    # Two spellings of one place, or a way out of a root, are no places.
    if not place.isprintable() or _ODD.search(place) or any(part in ("", ".", "..") for part in place.split("/")):
        raise AdapterError(f"'{path}' names no place: give the bucket, or the repository, and the path below it.")
    return Address(scheme, place, found["digest"] or "")
