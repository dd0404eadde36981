from __future__ import annotations

from rota.scheduler.sequence import EFFECT_AFTER_SKIPS, EFFECT_OF, Effect, Reason


def test_every_reason_to_refuse_the_first_of_a_queue_has_an_effect():
    # Such a sequence was not looked at.
    not_asked = {Reason.PAUSED, Reason.NOT_IN_SLOT, Reason.STEP_FULL, Reason.OTHER_TENANT}

    assert EFFECT_OF.keys() == set(Reason) - not_asked


def test_a_reason_that_skips_one_sequence_says_what_follows_when_many_were_skipped():
    skipping = {reason for reason, effect in EFFECT_OF.items() if effect is Effect.SKIP_ONE}

    assert EFFECT_AFTER_SKIPS.keys() == skipping
    assert Effect.SKIP_ONE not in EFFECT_AFTER_SKIPS.values()
