"""The fields of a sampler reach the engine as it knows them, and those about text change the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from rota.core.request import SamplingParams
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.fakes import FakeDevice
from tests.server.letters import CONTEXT, error_of, events_of, letters_device, serving

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
GENERATE = "/generate"
# Fields of one call that belong to the call in SGLang's shape, and not to its sampling.
OF_THE_CALL = {"stream", "priority", "cache_salt", "rid"}
END = 2

Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def client(device, tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), device) as client:
        yield client


def body_for(route: str, prompt: str, limit: int, fields: dict[str, Any]) -> dict[str, Any]:
    if route == GENERATE:
        of_call = {name: value for name, value in fields.items() if name in OF_THE_CALL}
        sampling = {name: value for name, value in fields.items() if name not in OF_THE_CALL}
        return {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": limit, **sampling}, **of_call}
    asked = {"messages": [{"role": "user", "content": prompt}]} if route == CHAT else {"prompt": prompt}
    return {**asked, "temperature": 0, "max_tokens": limit, **fields}


@pytest.fixture
def ask(client) -> Ask:
    def ask(route: str, prompt: str = "abc", limit: int = 4, **fields: Any) -> httpx.Response:
        return client.post(route, json=body_for(route, prompt, limit, fields))

    return ask


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    body = response.json()
    if "text" in body:
        return str(body["text"])
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def last_sampling(device: FakeDevice) -> SamplingParams:
    return [seat for plan in device.plans for seat in plan.seats][-1].sampling


each_route = pytest.mark.parametrize("route", [CHAT, COMPLETION, GENERATE])


@each_route
def test_fields_about_tokens_reach_the_engine(ask, device, route):
    least = {"min_new_tokens" if route == GENERATE else "min_tokens": 2}
    wanted = {"logit_bias": {"98": 2, "97": -500}, "allowed_token_ids": [100, 98, 98], "bad_words": ["no"]}
    response = ask(route, top_n_sigma=1.5, **wanted, **least)
    assert response.status_code == 200, response.text
    sampling = last_sampling(device)

    assert sampling.logit_bias == ((98, 2.0), (97, -100.0)), "beyond the limits is at the limit"
    assert sampling.allowed_token_ids == (98, 100)
    assert sampling.bad_words == (tuple(b"no"), tuple(b" no")), "at the beginning, and behind a space"
    assert (sampling.min_new_tokens, sampling.top_n_sigma) == (2, 1.5)


@each_route
def test_a_request_that_asks_for_none_of_it_has_none_of_it(ask, device, route):
    assert ask(route, logit_bias=None, allowed_token_ids=None, bad_words=[], top_n_sigma=-1).status_code == 200
    sampling = last_sampling(device)

    assert (sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_words) == ((), None, ())
    assert sampling.top_n_sigma is None


@each_route
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logit_bias": {"256": 1}}, "logit_bias.256", "logit_bias.256 is the token id 256; ids lie between 0 and 255"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "must be named by a token id"),
        ({"logit_bias": {"1e2": 1}}, "logit_bias.1e2", "must be named by a token id"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "should be a valid number"),
        ({"logit_bias": [5]}, "logit_bias", "should be an object"),
        ({"logit_bias": dict.fromkeys(map(str, range(5000)), 1)}, "logit_bias", "at most 1024 are allowed"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "allow at least one token"),
        ({"allowed_token_ids": [5, 256]}, "allowed_token_ids.1", "ids lie between 0 and 255"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids.0", "ids lie between 0 and 255"),
        ({"bad_words": ["a", " "]}, "bad_words.1", "not only spaces"),
        ({"bad_words": ["x" * 1001]}, "bad_words.0", "must have 1 to 1000 characters"),
        ({"bad_words": ["x"] * 257}, "bad_words", "at most 256 are allowed"),
    ],
)
def test_what_no_token_can_meet_is_400_and_names_the_field(ask, route, fields, param, words):
    refused = ask(route, **fields)
    where = "sampling_params." if route == GENERATE else ""

    assert refused.status_code == 400
    assert error_of(refused)["param"] == where + param
    assert words in error_of(refused)["message"]


@pytest.mark.parametrize("least", [-1, 5])
def test_an_answer_cannot_be_longer_than_it_may_be(ask, least):
    refused = ask(COMPLETION, min_tokens=least)

    assert (refused.status_code, error_of(refused)["param"]) == (400, "min_tokens")
    assert error_of(refused)["message"] == f"min_tokens must be between 0 and max_tokens (4), not {least}."


@each_route
def test_a_stop_string_is_text_while_the_answer_is_too_short(ask, route):
    least = {"min_new_tokens" if route == GENERATE else "min_tokens": 2}
    prompt = "ab" if route == CHAT else "abc"
    early = text_of(ask(route, prompt, 8, stop=["e"], **least))
    late = text_of(ask(route, prompt, 8, stop=["f"], **least))

    said = text_of(ask(route, prompt, 8))
    assert early == said, "'e' comes with the second token, and only once"
    assert late == said[: said.index("f")]


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_stop_string_is_part_of_the_text_if_it_is_kept(ask, name, is_kept):
    assert text_of(ask(COMPLETION, limit=9, stop=["fg"], **{name: is_kept})) == ("defg" if is_kept else "de")


def test_a_stop_token_is_part_of_the_text_if_it_is_kept(ask):
    assert text_of(ask(GENERATE, stop_token_ids=[ord("e")])) == "d"
    assert text_of(ask(GENERATE, stop_token_ids=[ord("e")], no_stop_trim=True)) == "de"


@each_route
def test_special_tokens_are_text_if_they_are_not_skipped(ask, route):
    ending = {"ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
    if route != CHAT:
        assert text_of(ask(route, "the end", 1, **ending)) == "<end>"
    assert text_of(ask(route, "the end", 1, ignore_eos=True, skip_special_tokens=True)) != "<end>"


def test_offsets_count_the_text_of_special_tokens_that_are_shown(ask):
    fields = {"ignore_eos": True, "skip_special_tokens": False, "logprobs": 0}
    logprobs = ask(COMPLETION, "the end", 3, **fields).json()["choices"][0]["logprobs"]

    assert logprobs["text_offset"][:2] == [0, len("<end>")]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_token_ids_come_beside_the_text_of_a_completion(ask, is_streamed):
    response = ask(COMPLETION, limit=3, return_token_ids=True, stream=is_streamed, n=2)
    events = events_of(response) if is_streamed else [response.json()]
    choices = [choice for event in events for choice in event["choices"]]

    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert [token for choice in own for token in choice["token_ids"]] == list(b"def")
        assert own[0]["prompt_token_ids"] == list(b"abc")
        assert not any("prompt_token_ids" in choice for choice in own[1:])


@pytest.mark.parametrize("is_streamed", [True, False])
def test_token_ids_come_beside_the_text_of_a_chat(ask, is_streamed):
    response = ask(CHAT, "abc", 3, return_token_ids=True, stream=is_streamed)
    first, *others = events_of(response) if is_streamed else [response.json()]

    assert first["prompt_token_ids"] == list(b"abc|")
    assert not any("prompt_token_ids" in event for event in others)
    told = [choice["token_ids"] for event in (first, *others) for choice in event["choices"]]
    assert len([token for part in told for token in part]) == 3


def test_a_stream_tells_the_tokens_of_half_a_character_as_they_come(ask):
    events = events_of(ask(COMPLETION, "é", 4, return_token_ids=True, stream=True))
    tokens = [choice["token_ids"] for event in events for choice in event["choices"]]

    assert [token for part in tokens for token in part] == [*"éé".encode()]


def test_a_stream_of_generate_has_the_tokens_of_half_a_character_too(ask):
    *_, last = events_of(ask(GENERATE, "é", 4, stream=True))

    assert last["output_ids"] == [*"éé".encode()]


def test_logprobs_name_tokens_by_their_ids_when_asked(ask):
    completion = ask(COMPLETION, limit=1, logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]
    chat = ask(CHAT, "abc", 1, logprobs=True, return_tokens_as_token_ids=True).json()["choices"][0]

    assert completion["logprobs"]["tokens"] == ["token_id:100"]
    assert completion["logprobs"]["top_logprobs"] == [{"token_id:100": -0.5}]
    assert chat["logprobs"]["content"][0]["token"].startswith("token_id:")


def entry(token: int, rank: int | None) -> dict[str, Any]:
    return {"logprob": -0.5 - (rank or 1) + 1, "rank": rank, "decoded_token": chr(token)}


@pytest.mark.parametrize("echoed", [{}, {"echo": True, "logprobs": 1}])
def test_a_prompts_logprobs_come_in_vllms_shape(ask, echoed):
    choice = ask(COMPLETION, "abc", 1, prompt_logprobs=1, **echoed).json()["choices"][0]
    chat = ask(CHAT, "abc", 1, prompt_logprobs=1).json()

    assert choice["prompt_logprobs"] == [None, {"98": entry(98, 1)}, {"99": entry(99, 1)}]
    assert chat["prompt_logprobs"][:3] == choice["prompt_logprobs"]
    assert len(chat["prompt_logprobs"]) == len("abc|")


def test_a_prompts_logprobs_without_alternatives_do_not_know_their_rank(ask):
    choice = ask(COMPLETION, "ab", 1, prompt_logprobs=0).json()["choices"][0]

    assert choice["prompt_logprobs"] == [None, {"98": entry(98, None)}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "only with a whole answer"),
        ({"prompt_logprobs": -1}, "between 0 and 20"),
        ({"prompt_logprobs": 2, "logprobs": 1, "echo": True}, "disagree"),
    ],
)
def test_a_prompts_logprobs_that_cannot_be_told_are_refused(ask, fields, words):
    refused = ask(COMPLETION, **fields)

    assert (refused.status_code, error_of(refused)["param"]) == (400, "prompt_logprobs")
    assert words in error_of(refused)["message"]


def test_the_last_tokens_of_a_prompt_are_kept(ask):
    body = ask(COMPLETION, "xyzabc", 2, truncate_prompt_tokens=3, echo=True, return_token_ids=True).json()

    assert body["choices"][0]["text"] == "abcde"
    assert body["choices"][0]["prompt_token_ids"] == list(b"abc")
    assert body["usage"]["prompt_tokens"] == 3


def test_a_prompt_may_be_cut_to_what_the_context_holds(ask):
    body = ask(COMPLETION, "x" * (CONTEXT + 50), 10, truncate_prompt_tokens=-1).json()

    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (CONTEXT - 10, 10)
    assert ask(CHAT, "x" * CONTEXT, 1, truncate_prompt_tokens=5).json()["usage"]["prompt_tokens"] == 5


def test_a_prompt_of_no_tokens_cannot_be_asked_for(ask):
    refused = ask(COMPLETION, truncate_prompt_tokens=0)

    assert (refused.status_code, error_of(refused)["param"]) == (400, "truncate_prompt_tokens")


def test_an_answer_goes_on_with_the_last_message(client):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "abc"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 3, "temperature": 0}

    assert text_of(client.post(CHAT, json=body)) == "ghi", "the model goes on behind 'hi|abc', its first six letters"
    refused = client.post(CHAT, json={**body, "add_generation_prompt": True})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "continue_final_message")


def test_a_call_is_named_by_its_body(ask):
    for name in ("request_id", "rid"):
        response = ask(CHAT, **{name: f"my-{name}"})
        assert response.json()["id"] == f"chatcmpl-my-{name}"
        assert response.headers["X-Request-Id"] == f"my-{name}"
    assert error_of(ask(COMPLETION, request_id="no spaces"))["param"] == "request_id"


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
def test_what_asks_for_nothing_is_taken(ask, route):
    nothing = {
        "use_beam_search": False,
        "length_penalty": 1.0,
        "early_stopping": False,
        "echo": False,
        "logits_processors": None,
        "mm_processor_kwargs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "truncate_prompt_tokens": None,
        "add_special_tokens": route == COMPLETION,
        "vllm_xargs": {},
    }
    if route == CHAT:
        nothing |= {"documents": None, "store": False, "verbosity": "medium", "chat_template": None}
    else:
        nothing |= {"best_of": 1, "suffix": ""}
    assert ask(route, **nothing).status_code == 200


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"use_beam_search": True}, "Rota does not support use_beam_search; n gives several sampled answers, and "),
        ({"length_penalty": 2.0}, "Rota does not support length_penalty other than 1.0; n gives"),
        ({"documents": [{"text": "x"}]}, "Rota does not support documents; write the documents into a message."),
        ({"detokenize": False}, "Rota does not support detokenize other than true; return_token_ids gives"),
    ],
)
def test_what_asks_for_something_else_gets_advice(ask, fields, sentence):
    refused = ask(CHAT, **fields)

    assert (refused.status_code, error_of(refused)["param"]) == (400, next(iter(fields)))
    assert error_of(refused)["message"].startswith(sentence)


def keyed(name: str, priority: int) -> tuple[bytes, Key]:
    return digest_of(name), Key(name, priority=priority)


@each_route
def test_a_priority_is_at_most_the_keys_own(tmp_path, route):
    device = letters_device()
    with serving(tmp_path, device, keys=KeyRing(dict([keyed("three", 3)]))) as client:

        def answer(**fields: Any) -> httpx.Response:
            head = {"Authorization": "Bearer three"}
            return client.post(route, json=body_for(route, "abc", 1, fields), headers=head)

        assert [answer(priority=priority).status_code for priority in (3, -5)] == [200, 200]
        refused = answer(priority=4)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "priority")
    assert "between -100 and 3, the most that this key may ask for, not 4" in error_of(refused)["message"]
