"""Trace headers say which trace a call is a part of."""

from __future__ import annotations

from fastapi import Request as HttpRequest

from rota.observe.journey import TraceHeaders


def trace_in(http: HttpRequest) -> TraceHeaders:
    """The W3C headers of a call; tracestate means nothing without traceparent."""
    if "traceparent" not in http.headers:
        return ()
    return tuple((name, http.headers[name]) for name in ("traceparent", "tracestate") if name in http.headers)
