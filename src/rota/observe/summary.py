"""A summary has percentiles of the times that clients saw, in all and per adapter."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rota.core.errors import FaultCode
from rota.core.events import Event, Finished, FinishReason, Produced
from rota.core.ids import BASE, AdapterId, RequestId
from rota.core.policy_config import READER_PACE
from rota.observe.table import by_number

# ── token times ─────────────────────────────────────────────────────────────────────────────────────────────────────
# Token times collect which requests got a token when, and give each request its times many at once.

# So many tokens take a few MB, and a request has most of its tokens among them.
MOST_TOKENS = 1 << 18


class TokenTimes:
    """A Python call for every token would take longer than all else that a simulation does with it."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._number_of: defaultdict[RequestId, int] = defaultdict(count().__next__)  # numbered as they come
        self._owners: array[int] = array("q")  # a number for every token, one step after the other
        self._moments: array[float] = array("d")  # of the steps
        self._counts: array[int] = array("q")  # tokens of the steps

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def is_full(self) -> bool:
        return len(self._owners) >= MOST_TOKENS

    def note(self, event: Produced) -> None:
        self._owners.extend(map(self._number_of.__getitem__, event.request_ids))
        self._moments.append(event.at)
        self._counts.append(len(event.request_ids))

    def take(self) -> Iterator[tuple[RequestId, NDArray[np.float64]]]:
        """Every request that got tokens, with their moments in order; from now on nothing is known of them."""
        owners: NDArray[np.integer] = np.frombuffer(self._owners, dtype=np.int64)
        moments = np.repeat(np.frombuffer(self._moments), np.frombuffer(self._counts, dtype=np.int64))
        request_ids = list(self._number_of)
        self._forget()
        if not len(owners):
            return
        if len(request_ids) <= 1 << 16:
            owners = owners.astype(np.uint16)  # numpy sorts short numbers several times faster
        order = np.argsort(owners, kind="stable")  # of the same request, the earlier token stays the earlier
        owners, moments = owners[order], moments[order]
        starts = np.flatnonzero(np.concatenate(([True], owners[1:] != owners[:-1])))
        for number, own in zip(owners[starts].tolist(), np.split(moments, starts[1:]), strict=True):
            yield request_ids[number], own


# ── readers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A reader takes an answer's text at a steady pace from its first token on, and stands still where there is none yet.


@dataclass(slots=True)
class Reader:
    """Reads one answer; `stalled_s` is the longest time that the reader stood still: a visible stall."""

    pace: float
    stalled_s: float = 0.0
    _tokens: int = 0
    _late_s: float = -math.inf  # how late the latest token so far came, for a reader that began at 0 and never stood

    def read(self, moments: NDArray[np.float64]) -> None:
        """The next tokens came at these moments."""
        late_s = moments - np.arange(self._tokens, self._tokens + len(moments)) / self.pace
        latest_s = np.maximum.accumulate(np.concatenate(([self._late_s], late_s)))
        if not self._tokens:
            late_s, latest_s = late_s[1:], latest_s[1:]  # nobody reads before the first token
        if len(late_s):
            self.stalled_s = max(self.stalled_s, float((late_s - latest_s[:-1]).max()))
        self._tokens += len(moments)
        self._late_s = float(latest_s[-1])


PERCENTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it."""

    adapter_id: AdapterId
    asked_at: float
    # Of its adapter and of its tenant: the times between its tokens are added here once it is answered.
    gaps: tuple[array[float], ...]
    tenant: str = ""
    first_at: float = math.nan
    last_at: float = math.nan
    ended_at: float = math.nan
    tokens: int = 0
    prompt_tokens: int = 0
    worst_gap_s: float = 0.0
    reason: FinishReason | None = None
    fault: FaultCode | None = None  # of a request that failed; a client over HTTP has a sentence instead
    own_gaps: array[float] = field(default_factory=lambda: array("d"))  # until it has ended
    reader: Reader | None = field(default_factory=lambda: Reader(READER_PACE))

    @property
    def is_answered(self) -> bool:
        return self.reason in (FinishReason.STOP, FinishReason.LENGTH)

    def note_tokens(self, moments: NDArray[np.float64]) -> None:
        """Tokens came at these moments, the earliest first."""
        if self.tokens:
            gaps = np.diff(moments, prepend=self.last_at)
        else:
            self.first_at, gaps = float(moments[0]), np.diff(moments)
        if len(gaps):
            self.own_gaps.frombytes(gaps.tobytes())
            self.worst_gap_s = max(self.worst_gap_s, float(gaps.max()))
        if self.reader:
            self.reader.read(moments)
        self.tokens += len(moments)
        self.last_at = float(moments[-1])

    def note_end(self, event: Finished) -> None:
        self.ended_at, self.reason = event.at, event.reason
        self.fault = event.fault.code if event.fault else None
        self.prompt_tokens = event.prompt_tokens
        # A stream may carry several tokens at a time; then the event's count is right.
        self.tokens = max(self.tokens, event.output_tokens)
        if self.is_answered:
            for gaps in self.gaps:
                gaps.extend(self.own_gaps)
        self.own_gaps = array("d")


@dataclass(slots=True)
class Recorder:
    """Follows events; `gaps` holds every time between two tokens of an answered request, by adapter.

    Tokens and ends of requests are collected first. The records have them after `settle`, which `summary` calls.
    """

    records: dict[RequestId, RequestRecord] = field(default_factory=dict)
    gaps: dict[AdapterId, array[float]] = field(default_factory=dict)
    tenant_gaps: dict[str, array[float]] = field(default_factory=dict)  # only of named tenants
    transients: set[AdapterId] = field(default_factory=set)  # adapters that come for a moment
    reader_pace: float = READER_PACE  # tokens a second; 0: there is no reader
    _coming: TokenTimes = field(default_factory=TokenTimes)
    _ended: list[Finished] = field(default_factory=list)

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, _tenant: str = "") -> None:
        gaps = self.gaps.setdefault(adapter, array("d"))
        reader = Reader(self.reader_pace) if self.reader_pace else None
        self.records[request_id] = RequestRecord(adapter, at, (gaps,), reader=reader)

    def note_tenant(self, request_id: RequestId, tenant: str) -> None:
        """A request that was just asked is this tenant's."""
        record = self.records[request_id]
        record.tenant = tenant
        record.gaps += (self.tenant_gaps.setdefault(tenant, array("d")),)

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            kind = type(event)
            if kind is Produced:
                self._coming.note(event)  # type: ignore[arg-type]
            elif kind is Finished:
                self._ended.append(event)  # type: ignore[arg-type]
        if not len(self._coming) or self._coming.is_full:
            self.settle()

    def settle(self) -> None:
        """Write all that was collected into the records."""
        for request_id, moments in self._coming.take():
            self.records[request_id].note_tokens(moments)
        for event in self._ended:
            if record := self.records.get(event.request_id):
                record.note_end(event)
        self._ended = []

    def summary(self, name_of: Callable[[AdapterId], str] = str) -> dict[str, Any]:
        """The shape that `bench` and `simulate` both write as JSON.

        `fairness` is Jain's index of mean TTFT over the adapters that share slots: not the base model, which needs no
        slot, nor transient adapters. An adapter without an answered request has no TTFT and is left out of the index.
        Its failed and aborted requests are still counted beside its name.
        """
        self.settle()
        by_adapter: dict[AdapterId, list[RequestRecord]] = {
            adapter: [] for adapter in sorted(self.gaps, key=lambda one: (one != BASE, by_number(name_of(one))))
        }
        for record in self.records.values():
            by_adapter[record.adapter_id].append(record)
        total = _summarise(list(self.records.values()), list(self.gaps.values()))
        parts = {adapter: _summarise(records, [self.gaps[adapter]]) for adapter, records in by_adapter.items()}
        total["adapters"] = {name_of(adapter): part for adapter, part in parts.items()}
        if self.tenant_gaps:
            total["tenants"] = {
                tenant: _summarise([one for one in self.records.values() if one.tenant == tenant], [gaps])
                for tenant, gaps in sorted(self.tenant_gaps.items(), key=lambda one: by_number(one[0]))
            }
        sharing = [
            adapter
            for adapter, records in by_adapter.items()
            if adapter != BASE and adapter not in self.transients and any(one.is_answered for one in records)
        ]
        total["fairness"] = jain([parts[adapter]["ttft_s"]["mean"] for adapter in sharing])
        return total


def _summarise(records: list[RequestRecord], gaps: list[array[float]]) -> dict[str, Any]:
    served = [one for one in records if one.is_answered]
    begun = min((one.asked_at for one in records), default=0.0)
    ended = max((one.ended_at for one in served), default=begun)
    duration_s = ended - begun
    totals = {
        "requests": len(served),
        "input_tokens": sum(one.prompt_tokens for one in served),
        "output_tokens": sum(one.tokens for one in served),
    }
    several = [one for one in served if one.tokens > 1]
    return {
        "requests": len(records),
        "failed": sum(one.reason is FinishReason.FAILED for one in records),
        "failures": dict(sorted(Counter(one.fault.value for one in records if one.fault).items())),
        "left": sum(one.reason is FinishReason.ABORT for one in records),
        "input_tokens": totals["input_tokens"],
        "output_tokens": totals["output_tokens"],
        "duration_s": duration_s,
        **{f"{name}_per_s": total / duration_s if duration_s else 0.0 for name, total in totals.items()},
        "ttft_s": spread([one.first_at - one.asked_at for one in served]),
        "e2e_s": spread([one.ended_at - one.asked_at for one in served]),
        "tpot_s": spread([(one.last_at - one.first_at) / (one.tokens - 1) for one in several]),
        "itl_s": spread(np.concatenate([np.frombuffer(one) for one in gaps if one] or [np.empty(0)])),
        "gap_s": spread([one.worst_gap_s for one in several]),
        "stall_s": spread([one.reader.stalled_s for one in several if one.reader]),
    }


def spread(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Mean, percentiles (nearest rank) and maximum; zeros if there are no values."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if not len(ordered):
        return {"mean": 0.0, **dict.fromkeys(PERCENTILES, 0.0), "max": 0.0}
    ranks = {name: float(ordered[math.ceil(share * len(ordered)) - 1]) for name, share in PERCENTILES.items()}
    return {"mean": float(ordered.mean()), **ranks, "max": float(ordered[-1])}


def mean_of(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One summary with the mean of every number; an adapter's numbers are means over the summaries that have it."""
    if len(summaries) == 1:
        return summaries[0]
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for summary in summaries for name in summary):
        values = [summary[name] for summary in summaries if name in summary]
        if name in ("failures", "routed"):
            merged[name] = _mean_counts(values)
        else:
            merged[name] = mean_of(values) if isinstance(values[0], dict) else sum(values) / len(values)
    return merged


def _mean_counts(counts: Sequence[dict[str, int]]) -> dict[str, float]:
    """A run without failures of a kind has none of them: it counts as zero."""
    return {name: sum(one.get(name, 0) for one in counts) / len(counts) for name in sorted({*chain(*counts)})}


def jain(values: list[float]) -> float:
    """Jain's fairness index: 1 if all values are equal or there are none, 1/n if only one is not zero."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
