from __future__ import annotations

import re

import pytest

from rota.core.errors import ConfigError
from rota.core.policy_config import PolicyConfig
from rota.policy.policy_options import DELAYER_READS, policy_config
from rota.policy.slot_policies import SLOT_POLICIES
from tests.policy.newest_first import NewestFirst


def refused(given: dict, compared: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as error:
        policy_config(given, compared)
    return str(error.value)


def test_a_threshold_above_0_without_a_policy_means_drain():
    assert policy_config({"lora_drain_wait_threshold": 3}).lora_policy == "drain"
    assert policy_config({"lora_drain_wait_threshold": 3}).lora_drain_wait_threshold == 3.0
    assert policy_config({}) == PolicyConfig()


def test_a_policy_that_does_not_exist_is_refused_by_the_flag_that_named_it():
    assert refused({"lora_policy": "first"}).startswith("lora_policy: 'first' is not a policy; the policies are ")
    assert refused({}, ("wait", "first")).startswith("compare: 'first' is not a policy; the policies are ")


def test_a_flag_that_the_chosen_policy_does_not_read_is_refused_with_what_to_do():
    assert refused({"lora_policy": "wait", "lora_drain_wait_threshold": 2.0}) == (
        "lora_drain_wait_threshold is 2, but lora_policy 'wait' does not read it; "
        "leave it out, or take lora_policy 'drain'."
    )
    assert "lora_policy 'rotate' does not read it" in refused({"lora_drain_wait_threshold": 0.0})
    assert "take lora_policy 'rotate'" in refused({"lora_policy": "drain", "lora_max_stall_ms": 50.0})
    assert "'drain' does not read it" in refused({"lora_drain_wait_threshold": 2.0, "lora_rotation_quantum_ms": 9.0})


def test_of_policies_that_are_compared_one_has_to_read_a_flag():
    given = {"lora_drain_wait_threshold": 2.0}
    assert policy_config(given, ("wait", "drain")) == PolicyConfig(lora_drain_wait_threshold=2.0)
    assert refused(given, ("wait", "rotate")) == (
        "lora_drain_wait_threshold is 2, but none of the compared policies (wait, rotate) reads it; "
        "leave it out, or compare 'drain' too."
    )


@pytest.mark.parametrize("name", DELAYER_READS)
def test_a_flag_of_the_prefill_delayer_is_refused_while_the_delayer_is_off(name):
    value, shown = ("auto", "'auto'") if name == "prefill_delayer_exchange" else (1, "1")
    assert re.fullmatch(f"{name} is {shown}, but the prefill delayer is off; leave it out, .*", refused({name: value}))
    assert getattr(policy_config({name: value, "enable_prefill_delayer": True}), name) == value


@pytest.mark.parametrize("kind", ["all-gather", "board"])
def test_an_exchange_is_refused_where_one_replica_has_nobody_to_share_reports_with(kind):
    given = {"enable_prefill_delayer": True, "prefill_delayer_exchange": kind}

    assert (
        refused({**given, "data_parallel_size": 1})
        == refused(given)
        == (
            f"prefill_delayer_exchange is '{kind}', but one replica has nobody to share reports with; leave it out, or "
            "ask for more replicas with data_parallel_size."
        )
    )
    assert policy_config({**given, "data_parallel_size": 2}).prefill_delayer_exchange == kind
    assert policy_config({**given, "prefill_delayer_exchange": "auto"}).prefill_delayer_exchange == "auto"


def test_a_policy_of_another_package_may_read_every_flag(monkeypatch):
    monkeypatch.setitem(SLOT_POLICIES, "newest-first", NewestFirst.from_config)
    given = {"lora_policy": "newest-first", "lora_rotation_quantum_ms": 5.0, "lora_drain_wait_threshold": 1.0}

    assert policy_config(given).lora_rotation_quantum_ms == 5.0


def test_an_option_that_is_left_at_none_is_not_given():
    assert policy_config({"prefill_delayer_queue_min_ratio": None}) == PolicyConfig()
