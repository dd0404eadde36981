"""A path that a client gives is a folder's, or an address of a source; a root says which of them it may be."""

from __future__ import annotations

from pathlib import Path

from rota.core.errors import AdapterError
from rota.sources.address import Address, has_scheme, is_repository, parse_address


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
