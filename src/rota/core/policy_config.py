"""The policy config says which policies decide about slots and prefills, and how they are tuned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rota.core.errors import ConfigError
from rota.core.options import option, refuse_unless

READER_PACE = 20.0  # tokens a second: a quick reader


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """How adapters share slots, and when prompts may start."""

    lora_policy: str = option(
        "rotate",
        "When more adapters have work than there are slots: 'rotate' lets them take turns, 'drain' makes room for an "
        "adapter that has waited too long, 'wait' lets adapters keep their slots.",
    )
    lora_rotation_quantum_ms: float | None = option(
        None, "How long a turn of a parked adapter takes (policy 'rotate'; default: a few steps, as measured)."
    )
    lora_max_stall_ms: float | None = option(
        None,
        "The longest pause of an answer that is promised (policy 'rotate'): while more adapters are parked than can "
        "have a turn in this time, others wait for their first token instead. Without it pauses grow with the crowd.",
    )
    lora_drain_wait_threshold: float = option(
        2.0,
        "Seconds an adapter may wait before another drains for it (policy 'drain'). A number above 0 without "
        "lora_policy means lora_policy 'drain'.",
    )
    reader_pace: float = option(
        READER_PACE,
        "Tokens a second that a reader takes: in a crowd turns come sooner to answers whose readers have no text "
        "(policy 'rotate'), and the server tells how long readers stand without text; 0: neither.",
    )
    enable_prefill_delayer: bool = option(False, "Hold new prompts back for a moment so that they start together.")
    prefill_delayer_max_delay_passes: int = option(30, "Passes a prompt may be held back.")
    prefill_delayer_max_delay_ms: float = option(5000.0, "Milliseconds any request may be held back in all.")
    prefill_delayer_token_usage_low_watermark: float | None = option(
        None, "Never hold prompts back while less than this share of KV is in use."
    )
    prefill_delayer_queue_min_ratio: float | None = option(
        None, "Wait until the queue has this share of the number of running requests (0.1 to 0.5 is typical)."
    )
    prefill_delayer_exchange: Literal["auto", "all-gather", "board"] = option(
        "auto",
        "How replicas share what the delayer decides by: 'all-gather' makes every pass wait for all replicas, 'board' "
        "never waits and goes by what the others said last. 'auto' takes 'board'.",
    )

    @property
    def read_s(self) -> float:
        """How long a reader takes for a token; 0: there is no reader."""
        return 1.0 / self.reader_pace if self.reader_pace else 0.0

    def __post_init__(self) -> None:
        milliseconds = ("lora_rotation_quantum_ms", "lora_max_stall_ms", "prefill_delayer_max_delay_ms")
        refuse_unless(lambda value: value > 0.0, "be above 0", self, *milliseconds)
        refuse_unless(lambda value: 0.0 <= value < math.inf, "be 0 or more", self, "reader_pace")
        self._check_threshold()
        if self.prefill_delayer_max_delay_passes < 1:
            raise ConfigError("prefill_delayer_max_delay_passes must be at least 1.")
        shares = ("prefill_delayer_token_usage_low_watermark", "prefill_delayer_queue_min_ratio")
        refuse_unless(lambda value: 0.0 < value <= 1.0, "lie above 0 and at most 1", self, *shares)

    def _check_threshold(self) -> None:
        threshold_s = self.lora_drain_wait_threshold
        if not 0.0 <= threshold_s < math.inf:
            raise ConfigError(f"lora_drain_wait_threshold must be seconds, 0 or more, not {threshold_s}.")
        if self.lora_policy == "drain" and not threshold_s:
            raise ConfigError(
                "lora_policy is 'drain', but a lora_drain_wait_threshold of 0 turns draining off; give it the seconds "
                "an adapter may wait, or take lora_policy 'wait'."
            )
