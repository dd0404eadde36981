"""Each grammar of a call is checked before its requests are sent to an engine."""

from __future__ import annotations

from rota.core.errors import RequestError
from rota.server.answer import ParsedCall
from rota.server.front import Front


async def check_grammars(front: Front, parsed: ParsedCall) -> None:
    """Raises RequestError for a grammar that no answer can follow."""
    grammars = {request.sampling.grammar for request in parsed.requests} - {None}
    for grammar in grammars:
        assert grammar is not None
        if front.room is None or not front.has_grammars:
            message = f"{grammar.param} is not supported: this server was started without grammars."
            raise RequestError.bad_field(grammar.param, message)
        await front.room.check(grammar, parsed.call.key.name)
