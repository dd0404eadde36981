"""Policy options make a policy config from what an operator gave, and refuse options that no chosen policy reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rota.core.errors import ConfigError
from rota.core.options import build
from rota.core.policy_config import PolicyConfig
from rota.policy.slot_policies import READS, SLOT_POLICIES, check_slot_policy

# The prefill delayer reads these. Its buckets are not among them: metrics have the histograms in any case.
DELAYER_READS = (
    "prefill_delayer_max_delay_passes",
    "prefill_delayer_max_delay_ms",
    "prefill_delayer_token_usage_low_watermark",
    "prefill_delayer_queue_min_ratio",
    "prefill_delayer_exchange",
)


def policy_config(given: Mapping[str, Any], compared: Collection[str] = ()) -> PolicyConfig:
    """The config that was asked for. `compared` are the slot policies of a comparison, instead of one."""
    config = build(PolicyConfig, given)
    if "lora_policy" not in given and not compared and given.get("lora_drain_wait_threshold"):
        config = replace(config, lora_policy="drain")  # as operators of SGLang know the flag
    for name in compared or [config.lora_policy]:
        check_slot_policy(name, "compare" if compared else "lora_policy")
    _refuse_unread(given, config, compared)
    return config


def _refuse_unread(given: Mapping[str, Any], config: PolicyConfig, compared: Collection[str]) -> None:
    chosen = compared or [config.lora_policy]
    for name in _not_read_by(chosen):
        if given.get(name) is None:
            continue
        readers = " or ".join(f"'{policy}'" for policy in SLOT_POLICIES if name in READS.get(policy, ()))
        if compared:
            why, advice = f"none of the compared policies ({', '.join(compared)}) reads it", f"compare {readers} too"
        else:
            why, advice = f"lora_policy '{config.lora_policy}' does not read it", f"take lora_policy {readers}"
        raise ConfigError(f"{name} is {given[name]:g}, but {why}; leave it out, or {advice}.")
    for name in () if config.enable_prefill_delayer else DELAYER_READS:
        if given.get(name) is not None:
            raise ConfigError(
                f"{name} is {_shown(given[name])}, but the prefill delayer is off; leave it out, or turn the delayer "
                "on with enable_prefill_delayer."
            )
    if given.get("prefill_delayer_exchange") not in (None, "auto") and _replicas(given) == 1:
        raise ConfigError(
            f"prefill_delayer_exchange is '{config.prefill_delayer_exchange}', but one replica has nobody to share "
            "reports with; leave it out, or ask for more replicas with data_parallel_size."
        )


def _shown(value: float | str) -> str:
    return f"'{value}'" if isinstance(value, str) else f"{value:g}"


def _replicas(given: Mapping[str, Any]) -> int:
    """How many replicas were asked for: a server's, or the simulator's."""
    return given.get("data_parallel_size") or given.get("replicas") or 1


def _not_read_by(policies: Iterable[str]) -> list[str]:
    """Options of slot policies that none of these reads; a policy that is not in the table may read any."""
    known = [READS.get(policy) for policy in policies]
    if None in known:
        return []
    read = {name for names in known for name in names or ()}
    return [name for names in READS.values() for name in names if name not in read]
