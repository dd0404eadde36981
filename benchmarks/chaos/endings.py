"""An ending is the one way in which a request ended, read from everything that its client received."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rota.bench.client import DONE, EventReader

from .documented import documented

Json = dict[str, Any]


class Kind(StrEnum):
    """The first three are ways to end; the others are not, unless the round's fault explains them."""

    FINISHED = "finished"  # complete, with the reason of every choice
    REFUSED = "refused"  # an error with a documented code
    LEFT = "left"  # the client closed the connection
    CUT = "cut"  # the connection ended before the answer did
    LATE = "late"  # nothing ended before the deadline
    BROKEN = "broken"  # an answer that contradicts itself or the documents


class Form(StrEnum):
    """How an answer says that it is complete."""

    OPENAI = "openai"
    NATIVE = "native"
    PLAIN = "plain"  # not a generating route: a status is the end


@dataclass(frozen=True, slots=True)
class Ending:
    """`outcome` is what is counted: 'length', 'stop+length', '429 queue_full', 'left', …"""

    kind: Kind
    outcome: str
    status: int | None = None
    detail: str = ""


@dataclass(slots=True)
class Received:
    """What a client has received so far."""

    status: int | None = None
    body: bytes = b""
    is_stream: bool = False
    is_complete: bool = False


def read_ending(received: Received, form: Form, choices: int) -> Ending:
    """The ending that a client sees once the server has closed the connection."""
    status = received.status
    if status is None or not received.is_complete:
        return Ending(Kind.CUT, "cut", status, f"after {len(received.body)} bytes of the body")
    if status >= 400:
        return _refusal(status, _parsed(received.body))
    if form is Form.PLAIN:
        return Ending(Kind.FINISHED, str(status), status, received.body[:200].decode("utf-8", "replace"))
    if received.is_stream:
        return _of_stream(EventReader().feed(received.body), form, choices)
    return _of_whole(_parsed(received.body), form, choices)


def _refusal(status: int, body: Any, where: str = "") -> Ending:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        # SGLang's shape of a refused load has no code, and is documented with its route.
        if status == 400 and isinstance(body, dict) and body.get("success") is False:
            return Ending(Kind.REFUSED, "400 success=false", status, str(body.get("error_message")))
        return _broken(f"status {status} without an error: {body!r:.300}", status)
    code = error.get("code")
    if (status, code) not in documented() or status == 500:
        return _broken(f"status {status} with code {code!r}: {error.get('message')!r:.300}", status)
    return Ending(Kind.REFUSED, f"{status} {code}{where}", status, str(error.get("message")))


def _of_whole(body: Any, form: Form, choices: int) -> Ending:
    if not isinstance(body, dict | list):
        return _broken(f"a whole answer is not JSON: {body!r:.300}")
    parts = body.get("choices", []) if isinstance(body, dict) and form is Form.OPENAI else _listed(body)
    reasons = [reason for part in parts if (reason := _reason(part, form))]
    if len(reasons) != choices:
        return _broken(f"{len(reasons)} of {choices} choices ended: {body!r:.300}")
    return _finished(reasons)


def _listed(body: Json | list[Any]) -> list[Any]:
    return body if isinstance(body, list) else [body]


def _of_stream(payloads: list[bytes], form: Form, choices: int) -> Ending:
    if payloads.count(DONE) != 1 or payloads[-1] != DONE:
        return _broken(f"a stream of {len(payloads)} events has {payloads.count(DONE)} [DONE], or not as its last")
    events = [_parsed(payload) for payload in payloads[:-1]]
    if any(not isinstance(event, dict) for event in events):
        return _broken("an event of a stream is not an object")
    errors = [event for event in events if "error" in event]
    ends, problem = _embed_head(events, form)
    if problem:
        return _broken(problem)
    if errors:
        if len(errors) > 1 or events[-1] is not errors[0]:
            return _broken(f"{len(errors)} errors in a stream, or not as its last event")
        return _refusal_in_stream(errors[0])
    if sorted(ends) != list(range(choices)):
        return _broken(f"the choices {sorted(ends)} of {choices} ended in a stream without an error")
    return _finished(list(ends.values()))


def _embed_head(events: list[Json], form: Form) -> tuple[dict[int, str], str]:
    """The reason of every choice that ended, and what is wrong with it."""
    ends: dict[int, str] = {}
    for event in events:
        for part in event.get("choices", []) if form is Form.OPENAI else [event] if "meta_info" in event else []:
            index = part.get("index") or 0
            if index in ends:
                return ends, f"choice {index} goes on after its end: {part!r:.300}"
            if reason := _reason(part, form):
                ends[index] = reason
    return ends, ""


def _refusal_in_stream(event: Json) -> Ending:
    """The status of an error in a stream is the documents' status of its code."""
    code = event["error"].get("code")
    statuses = [status for status, known in documented() if known == code and code is not None]
    return _refusal(statuses[0] if statuses else 500, event, " in a stream")


def _reason(part: Json, form: Form) -> str | None:
    if form is Form.OPENAI:
        return part.get("finish_reason")
    found = part.get("meta_info", {}).get("finish_reason")
    return found["type"] if found else None


def _finished(reasons: list[str]) -> Ending:
    return Ending(Kind.FINISHED, "+".join(sorted(Counter(reasons))), 200)


def _broken(detail: str, status: int | None = 200) -> Ending:
    return Ending(Kind.BROKEN, "broken", status, detail)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
