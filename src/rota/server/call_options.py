"""What a body asks for that is neither its prompt nor its sampling."""

from __future__ import annotations

from dataclasses import dataclass

from rota.text.stream import PLAIN_TEXT, TextOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """It is small, because it travels between processes."""

    text: TextOptions = PLAIN_TEXT
    cache_salt: str | None = None
    # Who asks, as the client says: a traffic route sends the same asker to the same target.
    asker: str | None = None
    # A higher one goes first. None: the key's own.
    priority: int | None = None
    # The client's own name for the call, and the field that holds it.
    name: str | None = None
    name_param: str = "request_id"
    # The answer has the tokens of the prompt and of itself.
    tells_tokens: bool = False
    # Log-probabilities name a token by its id.
    names_by_id: bool = False


NO_OPTIONS = CallOptions()
