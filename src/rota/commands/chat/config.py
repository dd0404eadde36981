"""The options of `rota chat`: which server, which adapter, and what is said first."""

from __future__ import annotations

from dataclasses import dataclass

from rota.commands.server_call import DEFAULT_URL
from rota.core.options import option


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Which server the chat talks to, and how."""

    base_url: str | None = option(
        None,
        f"The server's address; left out: {DEFAULT_URL} if a server runs there, else the built-in model is started "
        "for the time of the chat.",
    )
    api_key: str | None = option(None, "Sent as 'Authorization: Bearer KEY'.")
    adapter: str | None = option(None, "Who answers first; left out: the base model.")
    system: str | None = option(None, "What the model is told before the conversation.")
    message: str | None = option(None, "Ask this one thing, print the answer and end.")
    max_tokens: int | None = option(None, "Most tokens of an answer; left out: as many as the context holds.")
    temperature: float | None = option(None, "0 gives the likeliest tokens; left out: the server's own.")
