"""A process that asks for an adapter when it is told to, says what it got, and holds it until it is told to let go."""

from __future__ import annotations

import sys
from pathlib import Path

from rota.core.errors import AdapterError
from rota.sources.address import parse_address
from rota.sources.disk_cache import DiskCache
from rota.sources.download import sha256_of
from rota.sources.sources import Sources


def main(folder: str, most_bytes: str) -> None:
    """Each line that comes is an address; an empty line ends the hold of the one before."""
    sources = Sources(DiskCache(Path(folder), int(most_bytes)))
    print("ready", flush=True)
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            with sources.folder_of(parse_address(line.strip())) as found:
                print(*(f"{path.name}={sha256_of(path)}" for path in sorted(found.glob("adapter*"))), flush=True)
                sys.stdin.readline()
        except AdapterError as error:
            print(error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
