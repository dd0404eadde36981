"""`rota chat` talks to a server in the terminal, or through a pipe."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import typer

from rota.commands.flags import config_file, make_command, with_file
from rota.commands.server_call import DEFAULT_URL, KEY_HELP, CallError, with_key
from rota.core.options import build, option, options_of
from rota.runtime.lifeline import tied

# A signal asks a server of one's own to end; its engine then has this long.
STOP_S = 15.0
_ADDRESS = re.compile(r" at (https?://\S+)$")


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Which server the chat talks to, and how."""

    base_url: str | None = option(
        None,
        f"The server's address; left out: {DEFAULT_URL} if a server runs there, else the built-in model is started "
        "for the time of the chat.",
    )
    api_key: str | None = option(None, KEY_HELP)
    adapter: str | None = option(None, "Who answers first; left out: the base model.")
    system: str | None = option(None, "What the model is told before the conversation.")
    message: str | None = option(None, "Ask this one thing, print the answer and end.")
    max_tokens: int | None = option(None, "Most tokens of an answer; left out: as many as the context holds.")
    temperature: float | None = option(None, "0 gives the likeliest tokens; left out: the server's own.")


def chat_command() -> Callable[..., None]:
    return make_command(
        lambda given: chat(build(ChatConfig, with_key(with_file(given, ChatConfig)))),
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
    if given is not None or _is_served(usual):
        yield given or usual
        return
    note(f"No server runs at {usual}, so the built-in model is started for this chat.")
    with own_server() as url:
        yield url


@contextmanager
def own_server() -> Iterator[str]:
    """The address of a server that ends with the block, or with this process. Raises CallError if it does not start."""
    words = [sys.executable, "-m", "rota", "serve", "--port", "0", "--quiet", "--drain-timeout", "0"]
    # In a session of its own: a ctrl-C in the terminal is for the answer, and not for the server.
    with subprocess.Popen(tied(words), stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        try:
            yield _address(server)
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if found := _ADDRESS.search(line.strip()):
            return found[1]
    raise CallError("The built-in model could not be started.")


def _is_served(url: str) -> bool:
    """Whether a server listens there. It may still refuse the key, and then says so itself."""
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname, place.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _sampling(config: ChatConfig) -> dict[str, Any]:
    wanted = {"max_tokens": config.max_tokens, "temperature": config.temperature}
    return {name: value for name, value in wanted.items() if value is not None}
