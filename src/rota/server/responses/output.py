"""The output of /v1/responses: blocks become items, and their changes become events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rota.server.blocks import Block, Change, Step

Event = tuple[str, dict[str, Any]]

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
# The events of a text, by the kind of its block.
_DELTAS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class Output:
    """Writes the items of one answer. `logprobs` of the last chunks are taken by the next event with text."""

    def __init__(self, answer_id: str) -> None:
        self._name = answer_id.removeprefix("resp_")
        self.logprobs: list[dict[str, Any]] = []
        self._kept: list[dict[str, Any]] = []

    def item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._id(block), "status": status}
        if block.kind == "call":
            call = {"call_id": block.call.call_id, "name": block.call.name, "arguments": block.text}
            return {**head, "type": "function_call", **call}
        parts = [] if status == "in_progress" else [self._part(block)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
        return {**head, "type": "message", "role": "assistant", "content": parts}

    def events(self, change: Change, status: str) -> Iterator[Event]:
        """The events of a change; `status` is that of an item that ends."""
        match change.step:
            case Step.BEGUN:
                yield from self._begin(change.block)
            case Step.ADDED:
                kind = change.block.kind
                logprobs = {"logprobs": self._taken()} if kind == "text" else {}
                yield f"{_DELTAS[kind]}.delta", self._at(change.block) | {"delta": change.text} | logprobs
            case Step.ENDED:
                yield from self._end(change.block, status)

    def _begin(self, block: Block) -> Iterator[Event]:
        item = {**self.item(block, "in_progress"), **({"arguments": ""} if block.kind == "call" else {})}
        yield "response.output_item.added", {"output_index": block.index, "item": item}
        if block.kind != "call":
            yield "response.content_part.added", self._at(block) | {"part": self._part(Block(block.index, block.kind))}

    def _end(self, block: Block, status: str) -> Iterator[Event]:
        if block.kind == "call":
            done = {"name": block.call.name, "arguments": block.text}
            yield f"{_DELTAS['call']}.done", self._at(block) | done
        else:
            logprobs = {"logprobs": self._kept} if block.kind == "text" else {}
            yield f"{_DELTAS[block.kind]}.done", self._at(block) | {"text": block.text} | logprobs
            yield "response.content_part.done", self._at(block) | {"part": self._part(block)}
        yield "response.output_item.done", {"output_index": block.index, "item": self.item(block, status)}

    def _at(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": self._kept + self.logprobs}

    def _taken(self) -> list[dict[str, Any]]:
        taken, self.logprobs = self.logprobs, []
        self._kept += taken
        return taken

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._name}_{block.index}"
