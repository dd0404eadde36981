"""The delayer's table of verdicts, for one rank and for several."""

from __future__ import annotations

from rota.policy.prefill_delayer import DelayOutcome

ALL, SOME, NONE = "all", "some", "none"

TABLE = [
    # prefillable, force, slot, delays before, limit → verdict, delays after
    (NONE, False, False, 2, 30, DelayOutcome.NOTHING, 0),
    (ALL, True, True, 2, 30, DelayOutcome.TOKEN_WATERMARK, 0),
    (ALL, False, False, 2, 30, DelayOutcome.WAIT_SUCCESS, 0),
    (ALL, False, False, 0, 30, DelayOutcome.NO_WAIT, 0),
    (ALL, False, True, 0, 3, DelayOutcome.DELAY, 1),
    (ALL, False, True, 1, 3, DelayOutcome.DELAY, 2),
    (ALL, False, True, 2, 3, DelayOutcome.WAIT_TIMEOUT, 0),
    (SOME, True, True, 2, 30, DelayOutcome.TOKEN_WATERMARK, 0),
    (SOME, False, True, 1, 3, DelayOutcome.DELAY, 2),
    (SOME, False, False, 1, 3, DelayOutcome.DELAY, 2),
    (SOME, False, True, 2, 3, DelayOutcome.WAIT_TIMEOUT, 0),
]
