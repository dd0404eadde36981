"""Request limits say what is wrong with a request that can never be served, or not now."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rota.core.errors import Fault, FaultCode
from rota.core.ids import RequestId
from rota.core.request import Request
from rota.core.tenant import Tenant
from rota.scheduler.books import Books
from rota.scheduler.group import Standing


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the model, the KV cache and the queue can take."""

    max_sequence_tokens: int
    max_queued: int
    vocabulary: int | None  # token ids lie below it; None: any id may come

    def fault_of(self, request: Request, books: Books, held: Collection[RequestId] = ()) -> Fault | None:
        """Why a request cannot be taken; None if it can. `held` are open too, and in no queue."""
        group = books.groups.get(request.adapter_id)
        if request.request_id in books.sequences or request.request_id in held:
            return Fault(FaultCode.DUPLICATE_ID, f"A request with the id {request.request_id} is already open.")
        if group is None or group.standing is Standing.LEAVING:
            return Fault(FaultCode.UNKNOWN_ADAPTER, "The adapter this request asks for is not loaded.", "model")
        if fault := self._fault_of_prompt(request, books.blocks.total * books.blocks.block_size):
            return fault
        if books.waiting + len(held) >= self.max_queued:
            return Fault(FaultCode.QUEUE_FULL, f"{self.max_queued} requests already wait; try again later.")
        return _fault_of_tenant(request.tenant, books)

    def _fault_of_prompt(self, request: Request, kv_tokens: int) -> Fault | None:
        length = len(request.prompt)
        if length >= self.max_sequence_tokens:
            return Fault(
                FaultCode.PROMPT_TOO_LONG,
                f"The prompt has {length} tokens; with at least one token of output it must stay within the "
                f"context of {self.max_sequence_tokens}.",
                "prompt",
            )
        if length >= kv_tokens:
            return Fault(
                FaultCode.KV_TOO_SMALL,
                f"The prompt has {length} tokens, but the KV cache holds {kv_tokens} in all; shorten the prompt, "
                f"or give the server more memory (mem_fraction_static, kv_blocks).",
                "prompt",
            )
        if self.vocabulary is not None and (largest := max(request.prompt)) >= self.vocabulary:
            # A tokenizer may know more tokens than its model, such as padding; an unknown id would crash the device.
            return Fault(
                FaultCode.BAD_FIELD,
                f"The prompt holds the token id {largest}, but the model has only {self.vocabulary} tokens.",
                "prompt",
            )
        return self._fault_of_tokens(request)

    def _fault_of_tokens(self, request: Request) -> Fault | None:
        """A token that the model does not have would be written outside its row."""
        if self.vocabulary is None:
            return None
        for field, token in request.sampling.largest_tokens:
            if token >= self.vocabulary:
                message = f"{field} holds the token id {token}, but the model has only {self.vocabulary} tokens."
                return Fault(FaultCode.BAD_FIELD, message, field)
        return None


def _fault_of_tenant(tenant: Tenant, books: Books) -> Fault | None:
    account = books.accounts.get(tenant)
    if account is None or tenant.max_queued is None or account.waiting < tenant.max_queued:
        return None
    return queue_fault(tenant)


def queue_fault(tenant: Tenant) -> Fault:
    """As many requests of a tenant wait as may."""
    message = f"{tenant.max_queued} requests of this key already wait, as many as may (max_queued); try again later."
    return Fault(FaultCode.QUEUE_FULL, message)
