"""What a store's library says of an error, as a sentence without endpoints and secrets.

The library's own words hold the address of the endpoint, and may hold what was sent there: their first line goes to the
log alone.
"""

from __future__ import annotations

import logging
import re

from rota.sources.source import NothingError, SourceError, UnreachableError

LOG = logging.getLogger("rota.sources")

_NO_CREDENTIALS = "The server's environment has no credentials for {where}."
_REFUSED = "The store refuses the server's credentials for {where}."
_NO_TLS = "The store of {where} has no TLS, which AWS_ALLOW_HTTP=true in the server's environment would allow."
_AWAY = (
    (r"kind: Timeout|TimedOut", "The store of {where} did not answer in time."),
    (r"kind: Connect", "The store of {where} cannot be reached."),
    (r"kind: Interrupted", "The connection to the store of {where} breaks off."),
    (r"\bstatus: (?P<status>5\d\d|429)\b", "The store of {where} answers with the status {status}."),
)
_NOTHING = ((r"\bstatus: 404\b", "There is nothing at {where}."),)
# What the words have in them, and what is said instead; the first that fits. Where a machine of a cloud has no
# credentials in its environment, the library asks the cloud's own service for them.
_SENTENCES = (
    (r"(GET|PUT) http://(169\.254\.169\.254|metadata\.google\.internal)", _NO_CREDENTIALS),
    (r"BadScheme", _NO_TLS),
    (r"\bstatus: 40[13]\b", _REFUSED),
    (r"\bstatus: (?P<status>\d+)", "The store of {where} answers with the status {status}."),
)


def error_for(where: str, words: str) -> SourceError:
    first = words.strip().partition("\n")[0]
    LOG.warning("A store could not be read.", extra={"fields": {"source": where, "why": first[:500]}})
    for kind, sentences in ((UnreachableError, _AWAY), (NothingError, _NOTHING), (SourceError, _SENTENCES)):
        for pattern, sentence in sentences:
            if found := re.search(pattern, words):
                return kind(sentence.format(where=where, **found.groupdict()))
    return SourceError(f"{where} could not be read; the server's log says why.")
