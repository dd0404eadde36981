"""An address says where an adapter lies; a path that a client gives is a folder's, or an address of a source."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from rota.core.errors import AdapterError

# ── address ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# An address says where an adapter lies outside of this machine: `s3://bucket/legal`, `hf://org/name@v2`, `org/name`.
#
# An exact address ends in `#` and a digest of the tags of its files: it names one content, whatever lies there later.

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


# ── places ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A path that a client gives is a folder's, or an address of a source; a root says which of them it may be.


def address_of(path: str, root: str | None = None, key_root: str | None = None) -> Address | None:
    """The address that a path means; None: it is the path of a folder. Raises AdapterError if its root forbids it.

    `root` is the server's, and `key_root` takes its place. A root is a folder or the beginning of an address.
    """
    within = root if key_root is None else key_root
    if within is None:
        is_address = has_scheme(path) or (is_repository(path) and not Path(path).exists())
        return parse_address(path) if is_address else None
    if has_scheme(within):
        return _below(parse_address(within), path, is_keys=key_root is not None)
    if has_scheme(path) and key_root is None:
        raise _outside(path, within, is_keys=False)
    return None  # the reader of folders refuses it in the words for everything outside of a key's root


def hide_root(text: str, root: str | None) -> str:
    """A text for the client of a key: paths in the root of the key start at that root."""
    return text if root is None else text.replace(f"{root}/", "").replace(root, "the adapter root of this key")


def _below(root: Address, path: str, is_keys: bool) -> Address:
    address = parse_address(path if has_scheme(path) else f"{root}/{path}")
    if not address.lies_in(root):
        raise _outside(path, str(root), is_keys)
    return address


def _outside(path: str, root: str, is_keys: bool) -> AdapterError:
    if is_keys:
        return AdapterError("lora_path leads out of the adapter root of this key. Give a path below that root.")
    return AdapterError(f"{path} lies outside the adapter root {root}.")
