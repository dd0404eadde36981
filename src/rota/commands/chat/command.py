"""`rota chat` talks to a server in the terminal, or through a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from rota.commands.chat.config import ChatConfig
from rota.commands.flags import config_file, make_command, with_file
from rota.commands.server_call import DEFAULT_URL
from rota.core.options import build, options_of


def chat_command() -> Callable[..., None]:
    return make_command(
        lambda given: chat(build(ChatConfig, with_file(given, ChatConfig))),
        "Talk to a running server, or to the built-in model, and let any of its adapters answer. Answers come token by "
        "token, with their speed. Without a terminal, every line of the input is a message.",
        options_of(ChatConfig).values(),
        config_file(),
    )


def chat(config: ChatConfig, usual_url: str = DEFAULT_URL) -> None:
    """`usual_url`: where a server is looked for if none is named."""
    # Imported here, so that `rota --help` does not wait for an HTTP client.
    from rota.commands.chat.talk import Remote, Screen, Talk

    screen = Screen()
    with _server(config.base_url, usual_url, screen.note) as url:
        talk = Talk(Remote(url, config.api_key), screen, _sampling(config), config.system)
        if config.adapter is not None:
            talk.choose(config.adapter)
        if config.message is not None:
            talk.take(config.message)
        else:
            talk.begin()
            talk.run()
    if talk.has_failed and not screen.is_terminal:
        raise typer.Exit(1)


@contextmanager
def _server(given: str | None, usual: str, note: Callable[[str], None]) -> Iterator[str]:
    """The address that was given, that of a server on the usual port, or that of a server for this chat alone."""
    from rota.commands.chat.own_server import own_server

    if given is not None or _is_served(usual):
        yield given or usual
        return
    note(f"No server runs at {usual}, so the built-in model is started for this chat.")
    with own_server() as url:
        yield url


def _is_served(url: str) -> bool:
    """Whether a server listens there. It may still refuse the key, and then says so itself."""
    import socket
    from urllib.parse import urlsplit

    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname, place.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _sampling(config: ChatConfig) -> dict[str, Any]:
    wanted = {"max_tokens": config.max_tokens, "temperature": config.temperature}
    return {name: value for name, value in wanted.items() if value is not None}
