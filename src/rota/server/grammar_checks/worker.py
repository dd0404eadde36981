"""The main function of a process that checks grammars, one at a time, until its server ends."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from rota.core.errors import ModelError
from rota.core.grammar import Grammar
from rota.grammar.check import problem
from rota.grammar.vocabulary import Vocabulary
from rota.runtime.lifeline import die_with
from rota.server.memory_limit import limit_memory
from rota.text.tokenizer import Tokenizer

# The engine and the event loop go first where cores are few.
_NICENESS = 5
# An engine reads the grammar again, so a grammar may not cost it much.
MOST_CPU_S = 0.25


def check_main(connection: Connection, folder: Path, parent: int) -> None:
    """Serve until the connection ends: then the server has gone. The first message says why no grammar can be used."""
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGHUP):  # only the server decides what they mean
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with suppress(OSError):
        os.nice(_NICENESS)
    with suppress(EOFError, ConnectionError):
        try:
            tokenizer = Tokenizer(folder)
            vocabulary = Vocabulary(tokenizer, tokenizer.ids)
        except ModelError as error:
            connection.send_bytes(str(error).encode())
            return
        limit_memory()
        connection.send_bytes(b"")
        while True:
            connection.send_bytes(_verdict(vocabulary, connection.recv_bytes().decode()).encode())


def _verdict(vocabulary: Vocabulary, text: str) -> str:
    begun_s = time.process_time()
    found = problem(vocabulary, Grammar(text))
    took_s = time.process_time() - begun_s
    if not found and took_s > MOST_CPU_S:
        return f"it takes {took_s:.1f} seconds to read; at most {MOST_CPU_S:g} are allowed. Make it smaller."
    return found
