"""What a key may take: a call is let in with all that it may take, or it takes nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rota.core.config import ServerConfig
from rota.server.access.keys import ANYONE, Key, KeyRing, digest_of
from rota.server.access.limits import Bucket, CallDemand, Hold, KeyBalances, Limit, Met
from tests.fakes import FakeDevice
from tests.server.letters import CONTEXT, Gate, error_of, letters_device, serving


def admitted(limits: KeyBalances, key: Key, now: float = 0.0, **asked: Any) -> Hold | Met:
    """A call that enters and asks."""
    return limits.enter(key, now) or limits.admit(key, CallDemand(**asked), now)


def wait_s(met: Hold | Met | None) -> int | None:
    """How long a refused call waits. 0: it was let in."""
    return met.wait_s if isinstance(met, Met) else 0


def test_a_key_without_limits_is_never_refused():
    limits = KeyBalances()
    limits.charge(ANYONE, 10**9, 0.0)

    assert {wait_s(admitted(limits, ANYONE, answers=9, output_tokens=10**9)) for _ in range(1000)} == {0}


def test_a_minutes_worth_may_come_at_once_and_then_one_at_a_time():
    limits, key = KeyBalances(), Key("acme", requests_per_minute=6)

    assert [wait_s(limits.enter(key, 0.0)) for _ in range(7)] == [0] * 6 + [10]
    assert wait_s(limits.enter(key, 9.9)) == 1
    assert wait_s(limits.enter(key, 10.0)) == 0
    assert wait_s(limits.enter(key, 10.0)) == 10


def test_every_answer_of_a_call_is_a_request():
    limits, key = KeyBalances(), Key("acme", requests_per_minute=6)

    assert isinstance(admitted(limits, key, answers=4), Hold)
    assert admitted(limits, key, answers=4) == Met(Limit.REQUESTS, 4, 20)
    assert admitted(limits, key, answers=4) == Met(Limit.REQUESTS, 4, 20), "a call that is refused does not count"
    assert isinstance(admitted(limits, key, answers=2), Hold)
    assert isinstance(admitted(limits, key, now=40.0, answers=4), Hold)


def test_tokens_are_reserved_at_admission_and_what_was_not_used_is_given_back():
    limits, key = KeyBalances(), Key("acme", tokens_per_minute=60)

    first = admitted(limits, key, prompt_tokens=10, output_tokens=40)
    assert admitted(limits, key, prompt_tokens=10, output_tokens=10) == Met(Limit.TOKENS, 20, 10)
    first.settle(15, 0.0)
    assert admitted(limits, key, prompt_tokens=10, output_tokens=36) == Met(Limit.TOKENS, 46, 1)
    assert isinstance(admitted(limits, key, prompt_tokens=10, output_tokens=35), Hold)


def test_a_hold_is_settled_once():
    limits, key = KeyBalances(), Key("acme", tokens_per_minute=60, max_tokens_in_flight=60)
    hold = admitted(limits, key, output_tokens=60)
    for _ in range(3):
        hold.settle(20, 0.0)

    assert wait_s(admitted(limits, key, output_tokens=41)) == 1
    assert isinstance(admitted(limits, key, output_tokens=40), Hold)
    assert admitted(limits, key, now=60.0, output_tokens=21) == Met(Limit.IN_FLIGHT, 21, 1)


@pytest.mark.parametrize(
    ("limits", "asked", "met"),
    [
        ({"tokens_per_minute": 100}, {"prompt_tokens": 1, "output_tokens": 100}, (Limit.TOKENS, 101)),
        ({"tokens_per_minute": 100}, {"prompt_tokens": 101, "is_open_ended": True}, (Limit.TOKENS, 101)),
        ({"max_tokens_in_flight": 100}, {"prompt_tokens": 1, "output_tokens": 100}, (Limit.IN_FLIGHT, 101)),
        ({"requests_per_minute": 100}, {"answers": 101}, (Limit.REQUESTS, 101)),
        ({"max_running": 2, "max_queued": 3}, {"answers": 6}, (Limit.QUEUE, 6)),
        ({"max_running": 2, "max_queued": 3}, {"answers": 5}, None),
        ({"max_queued": 3}, {"answers": 6}, None),
        ({"tokens_per_minute": 100}, {"prompt_tokens": 1, "output_tokens": 99}, None),
        ({"max_tokens_in_flight": 100}, {"output_tokens": 900, "is_open_ended": True}, None),
    ],
)
def test_a_call_that_is_larger_than_a_limit_never_fits(limits, asked, met):
    found = admitted(KeyBalances(), Key("acme", **limits), **asked)

    assert found == Met(*met, None) if met else isinstance(found, Hold)


def test_an_answer_without_a_limit_reserves_what_the_key_has_and_may_leave_a_debt():
    limits, key = KeyBalances(), Key("acme", tokens_per_minute=60, max_tokens_in_flight=40)
    hold = admitted(limits, key, prompt_tokens=10, output_tokens=500, is_open_ended=True)
    hold.settle(80, 0.0)

    assert wait_s(limits.enter(key, 0.0)) == 21
    assert wait_s(limits.enter(key, 21.0)) == 0
    assert admitted(limits, key, now=90.0, output_tokens=41) == Met(Limit.IN_FLIGHT, 41, None)
    assert isinstance(admitted(limits, key, now=90.0, output_tokens=40), Hold)


def test_tokens_in_flight_are_free_again_when_the_answer_ends():
    limits, key = KeyBalances(), Key("acme", max_tokens_in_flight=100)
    first = admitted(limits, key, output_tokens=70)

    assert admitted(limits, key, output_tokens=31) == Met(Limit.IN_FLIGHT, 31, 1)
    assert isinstance(admitted(limits, key, output_tokens=30), Hold)
    first.settle(70, 0.0)
    assert isinstance(admitted(limits, key, output_tokens=70), Hold)


def test_a_call_that_one_limit_refuses_takes_nothing_from_the_others():
    key = Key("acme", requests_per_minute=2, tokens_per_minute=100, max_tokens_in_flight=50)
    limits = KeyBalances()
    hold = admitted(limits, key, output_tokens=50)
    for _ in range(9):
        assert admitted(limits, key, output_tokens=50) == Met(Limit.IN_FLIGHT, 50, 1)
    hold.settle(50, 0.0)

    assert isinstance(admitted(limits, key, output_tokens=50), Hold)
    assert admitted(limits, key) == Met(Limit.REQUESTS, 1, 30)


def test_a_limit_that_changes_keeps_the_debt_and_counts_from_the_next_call():
    limits = KeyBalances()
    limits.charge(Key("acme", tokens_per_minute=60), 90, 0.0)

    assert wait_s(limits.enter(Key("acme", tokens_per_minute=120), 0.0)) == 16
    assert wait_s(limits.enter(Key("acme"), 0.0)) == 0


def test_what_was_reserved_under_no_limit_is_not_given_back_to_a_new_one():
    limits, key = KeyBalances(), Key("acme", tokens_per_minute=60)
    hold = admitted(limits, Key("acme"), output_tokens=1000)
    limits.charge(key, 50, 0.0)
    hold.settle(0, 0.0)

    assert wait_s(admitted(limits, key, output_tokens=11)) == 1


def test_one_keys_spending_is_not_anothers():
    limits = KeyBalances()
    assert wait_s(limits.enter(Key("acme", requests_per_minute=1), 0.0)) == 0
    assert wait_s(limits.enter(Key("acme", requests_per_minute=1), 0.0)) == 60
    assert wait_s(limits.enter(Key("other", requests_per_minute=1), 0.0)) == 0


@given(
    st.integers(1, 100_000),
    st.integers(1, 1_000_000),
    st.lists(
        st.tuples(
            st.floats(0.0, 30.0),
            st.integers(1, 2000),
            st.integers(0, 300_000),
            st.integers(0, 300_000),
            st.booleans(),
        ),
        max_size=20,
    ),
)
@example(1, 1, [(7.731995831672094, 1, 0, 0, True), (1.7432239618541843, 1, 0, 0, True), (0.0, 1, 0, 0, True)])
def test_a_client_that_comes_back_when_told_is_let_in(requests, tokens, calls):
    limits, key, now = KeyBalances(), Key("acme", requests_per_minute=requests, tokens_per_minute=tokens), 0.0
    for pause_s, answers, reserved, used, is_open_ended in calls:
        now += pause_s
        asked = {"answers": answers, "output_tokens": reserved, "is_open_ended": is_open_ended}
        if met := limits.enter(key, now):
            now += met.wait_s
            assert limits.enter(key, now) is None
        found = limits.admit(key, CallDemand(**asked), now)
        if isinstance(found, Met) and found.wait_s is not None:
            now += found.wait_s
            found = admitted(limits, key, now, **asked)
            assert isinstance(found, Hold)
        if isinstance(found, Hold):
            found.settle(used, now)


# An event: seconds that pass, then either tokens to reserve, or the place of an open hold and what it used.
EVENTS = st.lists(
    st.tuples(
        st.floats(0.0, 90.0),
        st.one_of(st.integers(0, 1000), st.tuples(st.integers(0, 10), st.integers(0, 1500))),
    ),
    max_size=30,
)


@given(st.integers(1, 1000), EVENTS)
def test_reservations_and_settlements_in_any_order_create_no_token(per_minute, events):
    limits, now, used_in_all = KeyBalances(), 0.0, 0
    key = Key("acme", tokens_per_minute=per_minute, max_tokens_in_flight=5000)
    account, held = limits._balance(key, now), []
    for pause_s, event in events:
        now += pause_s
        if isinstance(event, int):
            if isinstance(hold := limits.admit(key, CallDemand(output_tokens=event), now), Hold):
                held.append((hold, event))
        elif held:
            hold, _ = held.pop(event[0] % len(held))
            hold.settle(event[1], now)
            used_in_all += event[1]
        assert account.in_flight == sum(reserved for _, reserved in held)
        spent = used_in_all + sum(reserved for _, reserved in held)
        assert account.tokens.level(now) <= per_minute
        assert account.tokens.level(now) + spent <= per_minute * (1.0 + now / 60.0) + 1e-6


@given(st.integers(1, 1000), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300)), max_size=20), st.randoms())
def test_while_no_time_passes_exactly_what_was_used_is_gone_in_whatever_order_holds_end(per_minute, calls, dice):
    limits, key = KeyBalances(), Key("acme", tokens_per_minute=per_minute)
    held = [
        (hold, used)
        for reserved, used in calls
        if isinstance(hold := limits.admit(key, CallDemand(output_tokens=reserved), 7.0), Hold)
    ]
    dice.shuffle(held)
    for hold, used in held:
        hold.settle(used, 7.0)

    account = limits._balance(key, 7.0)
    assert account.tokens.level(7.0) == per_minute - sum(used for _, used in held)
    assert account.in_flight == 0


def test_a_bucket_that_is_full_takes_no_more_back():
    bucket = Bucket(60, 0.0)
    bucket.spend(30, 0.0)
    bucket.spend(-30, 45.0)

    assert bucket.level(45.0) == 60.0


@pytest.mark.parametrize("limit", [1, 60, 600])
def test_after_the_first_minutes_worth_no_more_comes_through_than_that_a_minute(limit):
    limits, key = KeyBalances(), Key("acme", requests_per_minute=limit)
    let_in = sum(limits.enter(key, tick * 0.05) is None for tick in range(12_000))  # ten minutes

    assert let_in == pytest.approx(11 * limit, abs=1)


# ── over HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────────

CHAT = [{"role": "user", "content": "abc"}]


def keyed(folder: Path, device: FakeDevice | None = None, **limits: Any) -> AbstractContextManager[httpx.Client]:
    """A server whose keys have their names for secrets: a limited one and its neighbour."""
    keys = [Key("acme", **limits), Key("neighbour")]
    ring = KeyRing({digest_of(key.name): key for key in keys})
    config = ServerConfig(stream_keep_alive=0.05)
    return serving(folder, device or letters_device(), config, ring)


def ask(client: httpx.Client, key: str = "acme", route: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return client.post(route, json=fields, headers={"x-api-key": key})


def test_a_key_that_asks_for_far_more_than_its_minute_starts_nothing_and_its_neighbour_is_served(tmp_path):
    device = letters_device()
    with keyed(tmp_path, device, tokens_per_minute=100) as client:
        refused = [ask(client, prompt=["x"] * 150, max_tokens=8000) for _ in range(2)]
        assert [seat for plan in device.plans for seat in plan.seats] == []
        served = ask(client, "neighbour", prompt="abc", max_tokens=3)

    assert [answer.status_code for answer in refused] == [400, 400]
    assert "Retry-After" not in refused[0].headers
    assert error_of(refused[0])["param"] == "max_tokens"
    assert error_of(refused[0])["message"] == (
        f"This call has 150 prompt tokens and may have {150 * (CONTEXT - 1)} output tokens. Key 'acme' may have 100 "
        "tokens a minute, so this call can never be served; lower max_tokens, or send fewer or shorter prompts."
    )
    assert served.status_code == 200


@pytest.mark.parametrize(
    ("limits", "route", "fields", "param", "words"),
    [
        (
            {"tokens_per_minute": 50},
            "/generate",
            {"text": "abc", "sampling_params": {"max_new_tokens": 48}},
            "sampling_params.max_new_tokens",
            "3 prompt tokens and may have 48 output tokens. Key 'acme' may have 50 tokens a minute",
        ),
        (
            {"max_tokens_in_flight": 50},
            "/v1/chat/completions",
            {"messages": CHAT, "max_completion_tokens": 60},
            "max_completion_tokens",
            "Key 'acme' may have 50 tokens in flight (max_tokens_in_flight), so this call can never be served",
        ),
        (
            {"tokens_per_minute": 2},
            "/v1/chat/completions",
            {"messages": CHAT},
            "messages",
            "4 prompt tokens. Key 'acme' may have 2 tokens a minute, so this call can never be served; send a shorter",
        ),
        (
            {"requests_per_minute": 5},
            "/v1/completions",
            {"prompt": ["a", "b"], "n": 3},
            "prompt.0",
            "This call asks for 6 answers. Key 'acme' may have 5 requests a minute",
        ),
        (
            {"max_running": 2, "max_queued": 3},
            "/v1/completions",
            {"prompt": "abc", "n": 6},
            "prompt",
            "Key 'acme' may have 2 answers running (max_running) and 3 waiting (max_queued)",
        ),
    ],
)
def test_a_call_that_can_never_be_served_is_told_what_to_lower(tmp_path, limits, route, fields, param, words):
    with keyed(tmp_path, **limits) as client:
        refused = ask(client, route=route, **fields)
        assert ask(client, "neighbour", route, **fields).status_code == 200

    assert (refused.status_code, error_of(refused)["param"]) == (400, param)
    assert words in error_of(refused)["message"]
    assert "Retry-After" not in refused.headers


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/chat/completions", {"messages": CHAT, "n": 4, "max_tokens": 4}),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 2}}),
    ],
)
def test_every_choice_of_every_prompt_is_a_request(tmp_path, route, fields):
    with keyed(tmp_path, requests_per_minute=10) as client:
        answers = [ask(client, route=route, **fields) for _ in range(3)]
        small = ask(client, prompt="abc", n=2)

    assert [answer.status_code for answer in [*answers, small]] == [200, 200, 429, 200]
    assert answers[2].headers["Retry-After"] == "12"
    assert error_of(answers[2])["message"].startswith("Key 'acme' may have 10 requests a minute, and this call asks")


def test_a_chat_without_a_limit_reserves_what_its_key_has_and_settles_what_it_used(tmp_path):
    """It says the alphabet until the context ends: its prompt of 4 tokens and 196 more."""
    with keyed(tmp_path, tokens_per_minute=150) as client:
        first = ask(client, route="/v1/chat/completions", messages=CHAT)
        later = ask(client, route="/v1/chat/completions", messages=CHAT, max_tokens=1)

    assert (first.status_code, first.json()["usage"]["total_tokens"]) == (200, CONTEXT)
    assert later.status_code == 429
    assert later.headers["Retry-After"] == "21", "50 below zero, and 1 to go on with"


def test_open_answers_hold_their_tokens_until_they_end(tmp_path):
    gate = Gate()
    body = {"prompt": "abc", "max_tokens": 60, "stream": True}
    with (
        keyed(tmp_path, FakeDevice(next_token=gate), max_tokens_in_flight=100) as client,
        client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "acme"}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        refused = ask(client, prompt="abc", max_tokens=60)
        neighbour = client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "neighbour"})
        with neighbour as other:
            assert other.status_code == 200
            gate.set()
            list(lines)
        served = ask(client, prompt="abc", max_tokens=60)

    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert error_of(refused)["message"] == (
        "Key 'acme' may have 100 tokens in flight (max_tokens_in_flight), and this call reserves 63; come back when an "
        "open answer has ended."
    )
    assert served.status_code == 200


@pytest.mark.parametrize(
    ("route", "fields"), [("/v1/tokenize", {"prompt": "abcdef"}), ("/v1/detokenize", {"tokens": [97] * 6})]
)
def test_tokenizing_is_metered(tmp_path, route, fields):
    with keyed(tmp_path, tokens_per_minute=20) as client:
        by_tokens = [ask(client, route=route, **fields) for _ in range(5)]
    with keyed(tmp_path, requests_per_minute=2) as client:
        by_requests = [ask(client, route=route, **fields) for _ in range(3)]
        neighbour = ask(client, "neighbour", route, **fields)

    # Tokens are charged afterwards: the fourth call is let in with 2 tokens left.
    assert [answer.status_code for answer in by_tokens] == [200, 200, 200, 200, 429]
    assert by_tokens[4].headers["Retry-After"] == "15", "4 below zero, and 1 to go on with"
    assert [answer.status_code for answer in by_requests] == [200, 200, 429]
    assert neighbour.status_code == 200


def test_an_echo_without_output_reserves_its_prompt_alone(tmp_path):
    with keyed(tmp_path, tokens_per_minute=3) as client:
        assert ask(client, prompt="abc", max_tokens=0, echo=True, logprobs=1).status_code == 200
        assert ask(client, prompt="a", max_tokens=0, echo=True).status_code == 429
