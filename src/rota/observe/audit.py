"""The audit log has a line for every act that changes the server for others: who did what, and how it ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

LOG = logging.getLogger("rota.audit")
OK = "ok"

# Characters of a value that a client chose: enough to recognise it.
MOST_REPEATED, LONGEST_OUTCOME = 200, 1000


def log_act(action: str, key: str, client: str, outcome: str = OK, **details: Any) -> None:
    """`key` is the name of the key that acts, `client` its address. The outcome is "ok", or the reason against it."""
    if not LOG.isEnabledFor(logging.INFO):
        return
    shown = {name: value[:MOST_REPEATED] if isinstance(value, str) else value for name, value in details.items()}
    fields = {"action": action, "key": key, "client": client, **shown, "outcome": outcome[:LONGEST_OUTCOME]}
    LOG.info("audit", extra={"fields": fields})


def log_keys(changes: Mapping[str, list[str]], cause: str) -> None:
    """The names of the keys that a new key file gives, takes away and changes. Secrets are never logged."""
    LOG.info("audit", extra={"fields": {"action": "change_keys", "cause": cause, **changes, "outcome": OK}})


def log_refused_keys(reason: str, cause: str) -> None:
    """A new key file that cannot be used."""
    fields = {"action": "change_keys", "cause": cause, "outcome": reason}
    LOG.warning("The key file was read again and is not used; the old keys stay.", extra={"fields": fields})
