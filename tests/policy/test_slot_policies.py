from __future__ import annotations

import math

import pytest

from rota.core.errors import ConfigError
from rota.core.options import options_of
from rota.core.policy_config import PolicyConfig
from rota.policy.slot_policies import READS, SLOT_POLICIES, check_slot_policy, make_slot_policy
from rota.policy.slot_policy import SlotPolicy
from tests.builders import capacity
from tests.policy.views import A, Absent, B, Slots, view


@pytest.mark.parametrize("name", SLOT_POLICIES)
def test_every_policy_of_the_table_is_made_by_its_name_and_named_in_the_help_of_its_flag(name):
    policy = make_slot_policy(PolicyConfig(lora_policy=name), capacity(slots=3))

    assert type(policy).__name__.lower() == name
    assert f"'{name}'" in options_of(PolicyConfig)["lora_policy"].help


@pytest.mark.parametrize("name", SLOT_POLICIES)
def test_every_policy_reads_the_fields_that_the_table_says_and_no_others(name):
    read = set()

    class Watched:
        def __getattr__(self, field: str) -> object:
            read.add(field)
            return getattr(PolicyConfig(), field)

    SLOT_POLICIES[name](Watched(), capacity(slots=3))

    assert read == {*READS[name]}


def test_a_policy_that_is_not_in_the_table_is_refused_with_the_names_that_are():
    with pytest.raises(ConfigError, match="lora_policy: 'hope' is not a policy; the policies are rotate, drain, wait"):
        make_slot_policy(PolicyConfig(lora_policy="hope"), capacity(slots=3))
    with pytest.raises(ConfigError, match="compare: 'hope' is not a policy"):
        check_slot_policy("hope", "compare")


def test_a_policy_that_decides_nothing_lets_adapters_wait_by_age():
    class Nothing(SlotPolicy):
        pass

    policy = Nothing()
    slots = Slots([view(A, running=1)], Absent([view(B, waiting_since=1.0)]))
    policy.observe(slots, now=9.0)
    policy.forget(A)

    assert policy.due_at(view(B, waiting_since=1.0)) == 1.0
    assert policy.due_at(view(B, waiting_since=5.0, running=1, ran_at=3.0)) == 3.0
    assert (policy.turns(slots, now=9.0), policy.reserved, policy.take_news()) == ((), frozenset(), [])
    assert policy.admits(view(A), steps_needed=4096)
    assert policy.ask_again_at(slots, now=9.0) == math.inf
