"""An adapter's name appears in lists, log lines and metrics, so it is short and printable."""

from __future__ import annotations

from rota.core.errors import AdapterError

MAX_NAME = 200


def check_name(name: str) -> None:
    """Raises AdapterError for a name that is too long, or has characters that cannot be shown."""
    if len(name) > MAX_NAME or not name.isprintable():
        raise AdapterError(f"An adapter's name has at most {MAX_NAME} characters, all of them printable.")
