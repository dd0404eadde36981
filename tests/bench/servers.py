"""A server for tests of the bench: it speaks all the shapes, does what it is told and keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from tests.server.applications import running

DONE = "data: [DONE]\n\n"


@dataclass
class FakeServer:
    """Answers with a token every `step_s`; an adapter's name may say what shall go wrong with its answers.

    No answer begins before so many requests as `answers_from` says have been open at a time.
    """

    step_s: float = 0.0
    answers_from: int = 0
    adapters: tuple[str, ...] = ("a", "b", "c")
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    most_open: int = 0
    gone: threading.Event = field(default_factory=threading.Event)
    _open: int = 0
    _may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def running(self) -> Iterator[str]:
        app = FastAPI()
        app.add_api_route("/v1/models", self._models)
        app.add_api_route("/v1/completions", self._complete, methods=["POST"])
        app.add_api_route("/generate", self._generate, methods=["POST"])
        for verb in ("load", "unload"):
            for prefix in ("", "/v1"):
                app.add_api_route(f"{prefix}/{verb}_lora_adapter", self._tell, methods=["POST"])
        with running(app) as url:
            yield url

    async def _models(self) -> dict[str, Any]:
        adapters = [{"id": name, "root": f"/adapters/{name}", "parent": "base"} for name in self.adapters]
        return {"data": [{"id": "base", "root": "/base", "parent": None}, *adapters]}

    async def _tell(self, http: Request) -> Response:
        self.told.append((http.url.path, await http.json()))
        return Response()

    async def _complete(self, http: Request) -> Response:
        body = await self._note(http)
        if body["model"] == "unknown":
            return JSONResponse({"error": {"message": "There is no model 'unknown'."}}, 404)
        return self._stream(self._completion(body["model"], body["max_tokens"], body["prompt"]))

    async def _generate(self, http: Request) -> Response:
        body = await self._note(http)
        return self._stream(self._generated(body["sampling_params"]["max_new_tokens"], body.get("input_ids", [])))

    async def _note(self, http: Request) -> dict[str, Any]:
        body: dict[str, Any] = await http.json()
        self.asked.append(body)
        self.headers.append(dict(http.headers))
        return body

    def _stream(self, events: AsyncIterator[str]) -> Response:
        return StreamingResponse(self._counted(events), media_type="text/event-stream")

    async def _counted(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        if self.most_open >= self.answers_from:
            self._may_answer.set()
        try:
            async for event in events:
                yield event
        except asyncio.CancelledError:
            self.gone.set()
            raise
        finally:
            self._open -= 1

    async def _completion(self, model: str, tokens: int, prompt: Any) -> AsyncIterator[str]:
        yield ": a comment keeps the connection alive\n\n"
        await self._may_answer.wait()
        for number in range(tokens):
            if self.step_s:
                await asyncio.sleep(self.step_s)  # a step takes its time
            if model == "broken" and number == 1:
                yield _event({"error": {"message": "The engine died.", "code": "engine_died"}}) + DONE
                return
            is_last = number == tokens - 1
            if model == "endless" and is_last:
                return
            reason = ("abort" if model == "aborted" else "length") if is_last else None
            yield _event({"choices": [{"index": 0, "text": "x", "finish_reason": reason}]})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens}
        yield _event({"choices": [], "usage": usage}) + DONE

    async def _generated(self, tokens: int, prompt: list[int]) -> AsyncIterator[str]:
        for number in range(1, tokens + 1):
            if self.step_s:
                await asyncio.sleep(self.step_s)  # a step takes its time
            reason = {"type": "length", "length": tokens} if number == tokens else None
            meta = {"finish_reason": reason, "prompt_tokens": len(prompt), "completion_tokens": number}
            yield _event({"text": "x" * number, "meta_info": meta})
        yield DONE


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
