from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.fakes import FakeDevice
from tests.server.endless import ENDLESS, endless_device
from tests.server.letters import Gate, counts, events_in, events_of, has_ended, raw_ask, serving
from tests.waiting import until

Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def client(device, tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), device) as client:
        yield client


@pytest.fixture
def ask(client) -> Ask:
    def ask(prompt: Any = "abc", **fields: Any) -> httpx.Response:
        return client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})

    return ask


def texts(events: list[dict[str, Any]]) -> dict[int, str]:
    said: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
    return said


def test_a_prompt_is_continued(ask):
    body = ask("abc", max_tokens=4).json()

    assert body["object"] == "text_completion"
    assert body["model"] == "letters"
    assert body["choices"] == [{"index": 0, "text": "defg", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("fields", [{"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}])
def test_the_newer_word_for_a_number_of_tokens_is_taken_too(ask, fields):
    assert ask("abc", **fields).json()["usage"]["completion_tokens"] == 3


def test_without_max_tokens_sixteen_are_given(ask):
    assert ask("abc").json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        ("ab", ["cd"]),
        (["ab", "a"], ["cd", "bc"]),
        ([97, 98], ["cd"]),
        ([[97, 98], [97]], ["cd", "bc"]),
    ],
)
def test_a_prompt_may_be_text_or_tokens_one_or_many(ask, prompt, answers):
    choices = ask(prompt, max_tokens=2).json()["choices"]

    assert [choice["index"] for choice in choices] == list(range(len(answers)))
    assert [choice["text"] for choice in choices] == answers


def test_n_gives_every_prompt_as_many_choices_and_counts_it_once(ask):
    body = ask(["ab", "a"], n=3, max_tokens=2).json()

    assert [choice["text"] for choice in body["choices"]] == ["cd"] * 3 + ["bc"] * 3
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 12)


def test_the_end_of_sequence_stops_without_a_trace_unless_ignored(ask):
    stopped = ask("the end", max_tokens=3).json()["choices"][0]
    ignored = ask("the end", max_tokens=3, ignore_eos=True).json()["choices"][0]

    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")
    assert (ignored["text"], ignored["finish_reason"]) == ("", "length")


def test_a_token_that_stops_is_counted_and_is_no_part_of_the_text(ask):
    body = ask("abc", max_tokens=9, stop_token_ids=[ord("f")]).json()

    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("de", "stop")
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stop", ["gh", ["nothing", "gh"]])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_stop_string_across_tokens_ends_the_text_before_it(ask, stop, is_streamed):
    response = ask("abc", max_tokens=50, stop=stop, stream=is_streamed)
    if is_streamed:
        events = events_of(response)
        assert texts(events) == {0: "def"}
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        assert response.json()["choices"][0]["text"] == "def"
        assert response.json()["choices"][0]["finish_reason"] == "stop"
        assert response.json()["usage"]["completion_tokens"] == 5


def test_a_stream_gives_the_same_text_piece_by_piece(tmp_path):
    has_come = Gate()  # tokens come as they are made
    asked = {"prompt": "abc", "max_tokens": 12, "stream": True}
    with (
        serving(tmp_path, FakeDevice(next_token=has_come)) as client,
        client.stream("POST", "/v1/completions", json=asked) as response,
    ):
        lines = response.iter_lines()
        first = next(lines)
        has_come.set()
        events = events_in([first, *lines])

    assert response.headers["content-type"].startswith("text/event-stream")
    assert texts(events) == {0: "defghijklmno"}
    assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "length"]
    assert len({event["id"] for event in events}) == 1


def test_a_stream_of_many_choices_keeps_them_apart(ask):
    assert texts(events_of(ask(["ab", "a"], n=2, max_tokens=3, stream=True))) == {
        0: "cde",
        1: "cde",
        2: "bcd",
        3: "bcd",
    }


def test_a_stream_tells_its_usage_when_asked(ask):
    *others, last = events_of(ask("abc", max_tokens=3, stream=True, stream_options={"include_usage": True}))

    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert [event["usage"] for event in others] == [None] * len(others)


def test_a_stream_never_sends_half_a_character(ask):
    events = events_of(ask("é", max_tokens=5, stream=True))

    assert texts(events) == {0: "éé\ufffd"}, "however many characters come in a piece"


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_echo_gives_the_prompt_back_before_its_continuation(ask, prompt, is_streamed):
    response = ask([prompt] if isinstance(prompt, list) else prompt, echo=True, n=2, max_tokens=3, stream=is_streamed)
    choices = texts(events_of(response) if is_streamed else [response.json()])

    assert choices == {0: "abcdef", 1: "abcdef"}


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_echo_of_no_tokens_is_the_prompt_alone(ask, is_streamed):
    response = ask(["abc", "de"], echo=True, max_tokens=0, stream=is_streamed)
    events = events_of(response) if is_streamed else [response.json()]

    assert texts(events) == {0: "abc", 1: "de"}
    reasons = {choice["index"]: choice["finish_reason"] for event in events for choice in event["choices"]}
    assert reasons == {0: "length", 1: "length"}


def test_a_stream_tells_its_usage_with_every_event_when_asked(ask):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(ask("abc", max_tokens=3, stream=True, stream_options=options))

    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_a_prompt_seen_before_is_counted_as_cached(ask):
    prompt = "a prompt that fills two blocks of KV"
    ask(prompt, max_tokens=1)

    usage = ask(prompt, max_tokens=20, stop="d").json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 32}


def test_logprobs_come_in_the_shape_of_completions(ask):
    logprobs = ask("abc", max_tokens=2, logprobs=2).json()["choices"][0]["logprobs"]

    assert logprobs == {
        "tokens": ["d", "e"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"d": -0.5, "e": -1.5}, {"e": -0.5, "f": -1.5}],
        "text_offset": [0, 1],
    }


def test_logprobs_show_special_tokens_as_they_are_written_and_they_take_no_room_in_the_text(ask):
    logprobs = ask("<1>a<1>end", max_tokens=1, logprobs=0, echo=True).json()["choices"][0]["logprobs"]

    assert logprobs["tokens"] == ["<1>", "a", "<1>", "e", "n", "d", "<end>"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3, 4]


def test_a_streams_logprobs_count_their_offsets_through(ask):
    events = events_of(ask("abc", max_tokens=4, logprobs=0, stream=True))

    offsets = [offset for event in events for offset in event["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3]


def scored(prompt: str) -> dict[str, list[Any]]:
    """What an echo with one alternative tells of a prompt and its answer, a letter a token."""
    return {
        "tokens": list(prompt),
        "token_logprobs": [None, *(-0.5,) * (len(prompt) - 1)],
        "top_logprobs": [None, *({letter: -0.5} for letter in prompt[1:])],
        "text_offset": list(range(len(prompt))),
    }


def told(events: list[dict[str, Any]], index: int) -> dict[str, list[Any]]:
    """The log-probabilities of one choice, from all events."""
    parts = [choice["logprobs"] for event in events for choice in event["choices"] if choice["index"] == index]
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_echo_with_logprobs_scores_the_prompt_too_all_but_its_first_token(ask, prompt, is_streamed):
    response = ask(prompt, echo=True, logprobs=1, n=2, max_tokens=3, stream=is_streamed)
    events = events_of(response) if is_streamed else [response.json()]

    assert texts(events) == {0: "abcdef", 1: "abcdef"}
    for index in (0, 1):
        assert told(events, index) == scored("abcdef")


@pytest.mark.parametrize("prompt", ["a", "abc", "the end", "a prompt that fills two blocks of KV"])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_echo_of_no_tokens_with_logprobs_scores_the_prompt_and_keeps_no_token(ask, prompt, is_streamed):
    options = {"stream_options": {"include_usage": True}} if is_streamed else {}
    response = ask(prompt, echo=True, logprobs=1, max_tokens=0, stream=is_streamed, **options)
    events = events_of(response) if is_streamed else [response.json()]

    assert texts(events) == {0: prompt}
    assert told(events, 0) == scored(prompt)
    assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 0
    assert events[-1]["usage"]["prompt_tokens"] == len(prompt)


def test_what_an_evaluation_harness_asks_is_answered_in_one_call(ask):
    """As lm_eval's local-completions does: several prompts as tokens, and one token that it ignores."""
    prompts = [list(b"abc"), list(b"hello")]
    body = ask(prompts, echo=True, logprobs=1, max_tokens=1, seed=1234).json()
    lists = [choice["logprobs"] for choice in body["choices"]]

    assert [len(logprobs["token_logprobs"]) for logprobs in lists] == [4, 6]
    assert lists[1]["token_logprobs"][2:-1] == [-0.5] * 3
    assert [max(top.values()) for top in lists[1]["top_logprobs"][2:-1]] == [-0.5] * 3


def test_choices_with_a_seed_get_seeds_of_their_own(ask, device):
    device.plans.clear()
    ask("abc", max_tokens=1, n=2, seed=7, temperature=1.0)

    assert {seat.sampling.seed for plan in device.plans for seat in plan.seats} == {7, 8}


def test_choices_without_a_seed_are_given_seeds_that_differ_before_the_engine_sees_them(ask, device):
    device.plans.clear()
    ask("abc", max_tokens=1, n=3, temperature=1.0)
    seeds = [seat.sampling.seed for plan in device.plans for seat in plan.seats]

    assert None not in seeds
    assert len(set(seeds)) == 3


def test_what_other_servers_clients_send_is_understood(ask):
    nothing = {"echo": False, "logit_bias": None, "suffix": None, "min_tokens": 0}
    assert ask("abc", best_of=1, top_k=-1, user="me", **nothing).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tempratur": 1}, "tempratur", "'tempratur' is not a field; the nearest is temperature."),
        ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "is not a field"),
        ({"temperature": "hot"}, "temperature", "temperature should be a valid number"),
        ({"temperature": -1}, "temperature", "temperature must be between 0 and 100"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, not 0"),
        (
            {"max_completion_tokens": 0},
            "max_completion_tokens",
            "max_completion_tokens must be at least 1, not 0, unless",
        ),
        ({"max_completion_tokens": -5}, "max_completion_tokens", "max_completion_tokens must be at least 1, not -5"),
        (
            {"max_tokens": 1, "max_completion_tokens": 2},
            "max_completion_tokens",
            "max_tokens (1) and max_completion_tokens (2) disagree; send one of them",
        ),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens should be a valid integer"),
        ({"top_k": -2}, "top_k", "top_k must be at least 1"),
        ({"n": 0}, "n", "n must be between 1 and 128"),
        ({"stop": 1}, "stop", "stop must be a text or a list of texts"),
        ({"stop": ["a", 1]}, "stop.1", "stop.1 should be a valid string"),
        ({"stop": ""}, "stop", "not empty"),
        ({"logprobs": 99}, "logprobs", "logprobs must be between 0 and 20"),
        ({"suffix": "x"}, "suffix", "Rota does not support suffix; write what follows"),
        ({"n": 128, "prompt": ["a"] * 9}, "prompt", "asks for 1152 answers in one call; ask for at most 1024"),
        ({"best_of": 4}, "best_of", "does not support best_of other than n"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"prompt": 5}, "prompt", "prompt must be a text, a list of texts"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [300]}, "prompt.0", "token id 300; ids lie between 0 and 255"),
    ],
)
def test_a_bad_field_is_named_in_a_sentence(ask, fields, param, words):
    response = ask(**{"prompt": "abc", **fields})
    error = response.json()["error"]

    assert response.status_code == 400
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, "bad_field")
    assert words in error["message"]


def test_a_missing_prompt_is_said_to_be_missing(client):
    error = client.post("/v1/completions", json={}).json()["error"]
    assert (error["param"], error["message"]) == ("prompt", "prompt is missing.")


def test_a_body_that_is_not_json_is_refused(client):
    response = client.post("/v1/completions", content="{")
    assert response.status_code == 400
    assert "not JSON" in response.json()["error"]["message"]


def test_an_unknown_model_is_never_served_by_another(ask):
    response = ask(model="gpt-9")

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "known are: letters" in response.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"echo": True, "max_tokens": 0}])
@pytest.mark.parametrize(("prompt", "param"), [("x" * 300, "prompt"), (["x", "x" * 300], "prompt.1")])
def test_a_prompt_longer_than_the_context_is_400_with_the_numbers(ask, fields, prompt, param):
    response = ask(prompt, **fields)
    error = response.json()["error"]

    assert (response.status_code, error["param"]) == (400, param)
    assert "300 tokens" in error["message"]
    assert "200" in error["message"]


def test_an_unknown_path_is_404_in_the_same_shape(client):
    response = client.get("/v1/nothing")
    assert response.status_code == 404
    assert "/v1/nothing" in response.json()["error"]["message"]


def test_the_model_is_listed(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["root"], model["max_model_len"]) == ("letters", "/models/letters", 200)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_ends_its_requests(tmp_path, is_streamed):
    with serving(tmp_path, endless_device()) as client:
        asked = {"prompt": ["abc", "de"], "max_tokens": ENDLESS, "stream": is_streamed}
        with raw_ask(client, **asked) as connection:
            assert until(lambda: counts(client)["running"] == 2)
            assert not is_streamed or connection.recv(1)

        assert has_ended(client)
