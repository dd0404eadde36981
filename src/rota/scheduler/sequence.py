"""A sequence is a request's progress, written only by the scheduler.

tokens    p0 p1 p2 p3 p4 o0 o1          prompt, then output tokens that were read back
computed  ──────────────▶               KV known to be written
planned   ───────────────────▶          KV written or in flight; at depth 2 it may be longer than `tokens`
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from enum import Enum, StrEnum

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId, BlockId, RequestId, Row
from rota.core.request import Request
from rota.scheduler.accounts import PRIORITY_HEAD_START_S, Account

# ── reasons ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Reasons say why a sequence waits, and what that means for the sequences behind it.


class Reason(StrEnum):
    """Why a sequence waits."""

    PAUSED = "the server is paused"
    NOT_IN_SLOT = "its adapter is not in a slot"
    IN_FLIGHT = "its last step before preemption is still in flight"
    MAKING_ROOM = "its adapter makes room for another and this request would take too long"
    DELAYED = "prompts are held back for a moment to start together"
    NO_ROW = "as many requests run as may run"
    TENANT_FULL = "as many requests of its key run as may run (max_running)"
    OTHER_TENANT = "another tenant's turn"
    LOOKED_UP = "its prompt is still being looked up among the prompts before it"
    NO_KV = "its prompt does not fit into the KV blocks that are free"
    IN_LINE = "others that came first wait for KV"
    STEP_FULL = "others that came first fill the step"


class Effect(Enum):
    """What the refusal of one sequence means for the others in the same pass."""

    STOP = "no other sequence starts"
    STOP_TENANT = "no other sequence of its tenant starts"
    SKIP_GROUP = "the rest of its adapter's queue lacks the same thing"
    SKIP_TENANT = "the rest of its tenant's requests for its adapter wait behind it"
    SKIP_ONE = "the next of its adapter's queue may still start"


EFFECT_OF = {
    Reason.NO_ROW: Effect.SKIP_GROUP,
    Reason.TENANT_FULL: Effect.STOP_TENANT,
    Reason.IN_LINE: Effect.STOP_TENANT,
    Reason.IN_FLIGHT: Effect.SKIP_TENANT,
    Reason.DELAYED: Effect.SKIP_GROUP,
    Reason.LOOKED_UP: Effect.SKIP_ONE,
    Reason.NO_KV: Effect.SKIP_ONE,
    Reason.MAKING_ROOM: Effect.SKIP_ONE,
}

# A pass skips only a few sequences for the same reason; this is the effect of one more.
EFFECT_AFTER_SKIPS = {
    Reason.NO_KV: Effect.STOP_TENANT,
    Reason.LOOKED_UP: Effect.SKIP_GROUP,
    Reason.MAKING_ROOM: Effect.SKIP_GROUP,
}


Arrival = tuple[float, RequestId]


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a sequence may not start, since when, and when to ask again (infinity: when another sequence ends)."""

    reason: str
    since: float
    ask_again_at: float = math.inf


class Sequence:
    """Mutable on purpose, with __slots__: a step touches every running sequence."""

    __slots__ = (
        "account",
        "arrival",
        "block_keys",
        "blocks",
        "cached_tokens",
        "computed",
        "found",
        "given",
        "given_back",
        "held_s",
        "is_mixed",
        "limit",
        "moved_from",
        "next_full",
        "overtaken",
        "phase",
        "planned",
        "pooled",
        "pooling",
        "prompt_length",
        "read_until",
        "refusal",
        "request",
        "request_id",
        "room",
        "row",
        "scored",
        "seated_in",
        "step_id",
        "steps_in_flight",
        "stop_token_ids",
        "tokens",
        "turn",
        "yielded",
    )

    def __init__(self, request: Request, limit: int, account: Account) -> None:
        self.request = request
        self.account = account
        self.request_id = request.request_id
        # Priority is a bounded head start: it changes the order, and no request starves.
        self.arrival: Arrival = (request.arrived_at - request.priority * PRIORITY_HEAD_START_S, request.request_id)
        self.turn = self.arrival  # its place among the waiting sequences of its tenant
        self.prompt_length = len(request.prompt)
        self.limit = limit  # tokens, with the prompt, at which the sequence ends by length
        self.stop_token_ids = request.sampling.stop_token_ids
        self.tokens: list[int] = list(request.prompt)
        self.block_keys: list[bytes] = []  # names of full blocks of `tokens`, as far as they were needed
        self.found = 0  # of these, the first ones for which a written block was found when it was last looked up
        # Prompt tokens whose scores are told or in flight. The first token has no score; most requests ask for none.
        self.scored = self.prompt_length if request.sampling.prompt_logprobs is None else 1
        self.pooling = request.pooling
        self.cached_tokens = 0
        self.steps_in_flight = 0  # steps in flight that contain this sequence
        self.step_id = 0  # the last step that contains this sequence
        self.seated_in = 0  # how many steps its adapter had run when it last sat down
        self.overtaken = 0  # how many sequences were admitted before it while it lacked KV
        self.yielded = 0  # prompt tokens by which others have overtaken it while it was the oldest that had begun
        self.held_s = 0.0  # how long the prefill delayer has held it back in all
        self.refusal: Refusal | None = None  # why it was last refused
        # The reader had so many tokens when its adapter last left a slot, and they last until then.
        self.given = 0
        self.read_until = -math.inf
        self.moved_from: Adapter | None = None  # the version that it leaves; told when it sits down under the new one
        self.row: Row | None = None
        self.blocks: list[BlockId] = []
        self.stand_up()

    def stand_up(self) -> None:
        """Forget row and KV; the tokens stay."""
        self.phase = Phase.WAITING
        self.row = None
        self.blocks = []
        self.given_back = 0  # of its blocks, the first ones that no layer's window reaches any more
        self.room = 0  # tokens that its blocks can hold
        self.is_mixed = False  # is its KV of two versions of its adapter? Then no other sequence may find it
        self.computed = 0
        self.planned = 0
        self.pooled: list[float] = []  # the sum of the hidden states so far, for a request with pooling
        self.next_full = 0  # value of `computed` at which one more block is full

    def note_reader(self, at: float, step_s: float, read_s: float) -> None:
        """Its adapter leaves its slot; of the tokens that are new to the reader, one came with every step.

        Tokens in flight count: they come in a moment.
        """
        made = self.planned - self.prompt_length + 1
        if (new := made - self.given) > 0:
            self.read_until = max(self.read_until, at - new * step_s) + new * read_s
            self.given = made

    @property
    def holds_kv(self) -> bool:
        """Does it run, or is it parked, with a row or without?"""
        return bool(self.blocks)

    @property
    def held_blocks(self) -> list[BlockId]:
        return self.blocks[self.given_back :] if self.given_back else self.blocks

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def rest(self) -> int:
        """Tokens of its prompt that are not planned yet; after a preemption its output counts too."""
        return len(self.tokens) - self.planned

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length


def first_to_yield(sequence: Sequence, open_ids: Set[AdapterId]) -> tuple[int, bool, Arrival]:
    """Which sequence gives up its KV is the largest: of the lowest priority, parked before running, the newest."""
    return (-sequence.priority, sequence.row is None or sequence.request.adapter_id not in open_ids, sequence.arrival)
