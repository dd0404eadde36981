"""The main function of a process that checks grammars, one at a time, until its server ends."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from rota.core.errors import ModelError
from rota.grammar.vocabulary import Vocabulary
from rota.runtime.heap import freeze_heap
from rota.server.grammar_checks.copies import Copy
from rota.server.memory_limit import limit_memory
from rota.text.tokenizer import Tokenizer


def check_main(connection: Connection, folder: Path) -> None:
    """The first message says why no grammar can be used; it is empty if all is well."""
    try:
        tokenizer = Tokenizer(folder)
        vocabulary = Vocabulary(tokenizer, tokenizer.ids)
    except ModelError as error:
        connection.send_bytes(str(error).encode())
        return
    freeze_heap()  # else a collection in a copy would write to all that it shares
    limit_memory()
    copy = Copy(vocabulary, connection)
    connection.send_bytes(b"")
    while True:
        connection.send_bytes(copy.verdict(connection.recv_bytes()).encoded)
