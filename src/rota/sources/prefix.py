"""A prefix is a folder or an address below which adapters lie; a name stands for the adapter at that place below it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path, PurePath

from rota.core.adapter import split_label
from rota.core.errors import AdapterError, ConfigError
from rota.core.lora_paths import LoraPath
from rota.sources.address import has_scheme, parse_address
from rota.sources.beneath import Beneath, LeavesError
from rota.sources.source import CONFIG

MOST_NAME = 200
NO_ROOTS: Mapping[str, str | None] = {}


class Prefix:
    """Where a server looks for adapters that it was not told of."""

    def __init__(self, place: str) -> None:
        """Raises ConfigError for a place that cannot be."""
        try:
            self.place = str(parse_address(place).plain) if has_scheme(place) else str(_folder(place))
        except AdapterError as error:
            raise ConfigError(f"lora_resolver: {error}") from error

    def entry(self, name: str, roots: Mapping[str, str | None] = NO_ROOTS) -> LoraPath | None:
        """What a name stands for; None if it cannot be a place below, or is a version's. It has not been looked at.

        `roots` are those of keys, each with its owner, who owns what lies there too. A place in one of them must not
        lead out of it, whichever key asks for the name: its links are made by the key's tenant.
        """
        parts = name.split("/")
        if len(name) > MOST_NAME or not name.isprintable() or any(part in ("", ".", "..") for part in parts):
            return None
        if split_label(name):
            return None
        path = f"{self.place}/{name}"
        if has_scheme(self.place):
            try:
                parse_address(path)
            except AdapterError:
                return None
        entry = LoraPath(name=name, path=path, root=self.place)
        narrowest = max([self.place, *(root for root in roots if is_within(entry, root))], key=len)
        return replace(entry, root=narrowest, owner=roots.get(narrowest))

    def is_missing(self, entry: LoraPath) -> bool:
        """Whether a folder is surely not there; of an address, only its source can say so. Blocks on the disk.

        What leads out of the entry's root is not looked at: the reader of folders refuses it.
        """
        if has_scheme(self.place):
            return False
        try:
            with closing(Beneath(Path(entry.root or self.place))) as place:
                place.enter(entry.path)
                os.close(place.open(CONFIG)[0])
        except LeavesError:
            return False
        except (OSError, ValueError):
            return True
        return False


def is_within(entry: LoraPath, root: str) -> bool:
    """Whether an entry of a prefix lies below a root, which is a folder or an address too."""
    if has_scheme(entry.path) != has_scheme(root):
        return False
    if has_scheme(root):
        return parse_address(entry.path).lies_in(parse_address(root))
    return PurePath(entry.path).is_relative_to(root)


def _folder(place: str) -> Path:
    """With links followed, as the roots of keys are."""
    folder = Path(place).expanduser().resolve()
    if not folder.is_dir():
        raise AdapterError(f"There is no folder {place}.")
    return folder
