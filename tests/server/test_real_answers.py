"""A real model over HTTP: each field does what it says, answers have the given form, and adapters answer as offline."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import jsonschema
import pytest

from rota import LLM, SamplingParams
from rota.core.lora_paths import LoraPath
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.server.letters import error_of, events_of
from tests.server.models import TINY, serving_model
from tests.tiny_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("tiny")
    make_adapter(folder / "pirate", make_tiny_model(write_byte_tokenizer(folder), "smollm2"))
    pirate = LoraPath(name="pirate", path=str(folder / "pirate"))
    with serving_model(folder, [pirate], has_grammars=True, kv_blocks=128, max_running_requests=8) as client:
        yield client


# ── fields about tokens ───────────────────────────────────────────────────────────────────────────────────────────────

LENGTH = 24
END = 2

Tokens = list[int]
Generate = Callable[..., Tokens]


@pytest.fixture
def generate(client) -> Generate:
    def generate(prompt: str = "once upon", **sampling: Any) -> Tokens:
        body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": LENGTH, **sampling}}
        answer = client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        tokens: Tokens = answer.json()["output_ids"]
        return tokens

    return generate


def test_a_bias_brings_a_token_or_takes_it_away(generate):
    plain = generate(ignore_eos=True)
    common, _ = Counter(plain).most_common(1)[0]

    assert generate(ignore_eos=True, logit_bias={"120": 100}) == [120] * LENGTH
    assert common not in generate(ignore_eos=True, logit_bias={str(common): -100})
    assert generate(ignore_eos=True, logit_bias={"120": 0}) == plain


def test_only_allowed_tokens_come(generate):
    allowed = [97, 98, 99]

    for temperature in (0, 1):
        assert {*generate(ignore_eos=True, allowed_token_ids=allowed, temperature=temperature)} <= {*allowed}


def test_an_answer_has_its_least_length_before_it_may_end(generate):
    ending = {"logit_bias": {str(END): 100}}

    assert generate(**ending) == [END]
    answer = generate(**ending, min_new_tokens=5)
    assert (len(answer), answer.index(END)) == (6, 5)


def test_a_bad_word_never_comes_and_its_letters_do(generate):
    answer = generate(ignore_eos=True, allowed_token_ids=[97, 98], logit_bias={"97": 50}, bad_words=["aaa"])

    assert bytes(answer) == b"aab" * (LENGTH // 3)


def test_few_deviations_leave_few_tokens(generate):
    tight = [generate(ignore_eos=True, temperature=2, top_n_sigma=0.01, sampling_seed=seed) for seed in range(3)]
    loose = [generate(ignore_eos=True, temperature=2, sampling_seed=seed) for seed in range(3)]

    assert tight[0] == tight[1] == tight[2] == generate(ignore_eos=True)
    assert loose[0] != loose[1]


def test_requests_with_and_without_such_fields_share_a_batch_and_do_not_touch_each_other(generate):
    wishes: list[dict[str, Any]] = [
        {},
        {"logit_bias": {"120": 100}},
        {"allowed_token_ids": [97, 98]},
        {"min_new_tokens": 3, "logit_bias": {str(END): 100}, "ignore_eos": False},
        {"bad_words": ["e", "a"]},
        {},
    ]
    sampling = [{"ignore_eos": True, **wish} for wish in wishes]
    alone = [generate(**one) for one in sampling]
    with ThreadPoolExecutor(len(wishes)) as threads:
        together = list(threads.map(lambda one: generate(**one), sampling))

    assert together == alone


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_openais_routes_take_the_same_fields(client, route):
    asked = {"prompt": "once"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "once"}]}
    fields = {"logit_bias": {"97": 100, str(END): 50}, "bad_words": ["aaa"], "min_tokens": 4, "max_tokens": 9}
    body = {**asked, **fields, "temperature": 0, "return_token_ids": True, "prompt_logprobs": 2}
    answer = client.post(route, json=body).json()
    tokens = answer["choices"][0]["token_ids"]

    assert tokens[:2] == [97, 97]
    assert tokens[2] not in (97, END), "a third one is the word, and the answer may not end yet"
    scores = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert all(2 <= len(score) <= 3 for score in scores[1:])


def test_what_leaves_no_token_is_an_error_and_not_a_wait(client):
    sampling = {"allowed_token_ids": [97], "bad_words": ["a"], "max_new_tokens": 3}
    answer = client.post("/generate", json={"text": "once", "sampling_params": sampling})

    assert answer.status_code == 400
    assert error_of(answer)["message"].startswith("No token is left that may come next")


# ── answers of a given form ───────────────────────────────────────────────────────────────────────────────────────────

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "age", "names"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


def chat(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "a pet"}], "max_tokens": 250, "seed": 3, **fields}
    return client.post("/v1/chat/completions", json=body)


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"temperature": 0},
        {"model": "pirate"},
        {"ignore_eos": True},
        {"presence_penalty": 1.5, "repetition_penalty": 1.2, "top_p": 0.8},
        {"logprobs": True, "top_logprobs": 2},
    ],
)
def test_an_answer_meets_its_schema(client: httpx.Client, others: dict[str, Any]) -> None:
    (choice,) = chat(client, response_format=FORMAT, **others).json()["choices"]
    assert choice["finish_reason"] == "stop"
    check(choice["message"]["content"])


def test_each_choice_meets_the_schema_by_itself(client: httpx.Client) -> None:
    choices = chat(client, response_format=FORMAT, n=4).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 4
    for choice in choices:
        check(choice["message"]["content"])
    assert len({choice["message"]["content"] for choice in choices}) > 1


def test_a_stream_says_the_same_as_a_whole_answer(client: httpx.Client) -> None:
    whole = chat(client, response_format=FORMAT).json()["choices"][0]["message"]["content"]
    events = events_of(chat(client, response_format=FORMAT, stream=True))
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_large_schema_is_read_in_a_worker_and_kept_too(client: httpx.Client) -> None:
    names = [f"n{number}" for number in range(100)]
    schema = {"properties": {name: {"type": "null"} for name in names}, "type": "object", "additionalProperties": False}
    (choice,) = chat(client, guided_json={**schema, "required": names[:2]}, temperature=0).json()["choices"]
    assert re.match(r'\{\s*"n0"\s*:\s*null\s*,\s*"n1"', choice["message"]["content"])


def test_a_seed_repeats_an_answer(client: httpx.Client) -> None:
    first, second = (chat(client, response_format=FORMAT, seed=9).json()["choices"] for _ in range(2))
    assert first == second


def test_an_answer_that_is_cut_says_so(client: httpx.Client) -> None:
    (choice,) = chat(client, response_format=FORMAT, max_tokens=5).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")


def test_a_stop_string_ends_an_answer_before_its_grammar_does(client: httpx.Client) -> None:
    (choice,) = chat(client, guided_regex="a{5}-b{5}", stop="-").json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("aaaaa", "stop")


def test_prompts_of_one_call_may_have_different_forms(client: httpx.Client) -> None:
    params = [{"regex": "[0-9]{3}"}, {"ebnf": 'root ::= "yes" | "no"'}, {"json_schema": json.dumps(SCHEMA)}]
    params = [{"max_new_tokens": 250, "sampling_seed": 1, **one} for one in params]
    body = {"text": ["a", "b", "c"], "sampling_params": params, "lora_path": [None, "pirate", None]}
    number, word, pet = (one["text"] for one in client.post("/generate", json=body).json())
    assert re.fullmatch("[0-9]{3}", number)
    assert word in ("yes", "no")
    check(pet)


def test_a_prompt_is_continued_in_a_form(client: httpx.Client) -> None:
    body = {"prompt": ["a", "b"], "guided_choice": ["left", "right"], "echo": True, "logprobs": 1}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert all(re.fullmatch("[ab](left|right)", choice["text"]) for choice in choices)


def test_a_grammar_and_fields_that_leave_no_token_end_with_a_sentence(client: httpx.Client) -> None:
    response = chat(client, guided_choice=["a"], allowed_token_ids=[98])
    assert response.status_code == 400
    assert error_of(response)["message"].startswith("No token is left that may come next")


def test_a_stream_tells_an_error_in_the_form_before_it_begins(client: httpx.Client) -> None:
    response = chat(
        client, response_format={"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}, stream=True
    )
    assert response.status_code == 400
    assert error_of(response)["message"] == "response_format.json_schema.schema cannot be followed: Invalid type: x."


def test_structural_tags_are_json_within_free_text(client: httpx.Client) -> None:
    tags = {"structures": [{"begin": "<", "schema": {"type": "boolean"}, "end": ">"}], "triggers": ["<"]}
    likely = {str(ord("<")): 8}
    (choice,) = chat(client, response_format={"type": "structural_tag", **tags}, logit_bias=likely).json()["choices"]
    _, *tagged, _ = choice["message"]["content"].split("<")  # the last may be cut
    assert len(tagged) > 3
    assert [one for one in tagged if not re.match("(true|false)>", one)] == []


# ── adapters ──────────────────────────────────────────────────────────────────────────────────────────────────────────

PROMPT = "once upon a time"
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)


def test_adapters_answer_over_http_as_they_do_offline(tmp_path):
    folder = write_byte_tokenizer(tmp_path / "tiny")
    model = make_tiny_model(folder, "smollm2")
    paths = {name: str(make_adapter(tmp_path / name, model, seed)) for seed, name in enumerate(("pirate", "poet"))}
    offline = LLM(folder, adapters=paths, quiet=True, **TINY).generate(
        [PROMPT] * 3, replace(GREEDY, prompt_logprobs=0), adapter=[None, "pirate", "poet"]
    )

    with (
        serving_model(folder, [LoraPath(name="pirate", path=paths["pirate"])]) as client,
        ThreadPoolExecutor(3) as threads,
    ):
        loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "poet", "lora_path": paths["poet"]})
        missing = client.post("/v1/load_lora_adapter", json={"lora_name": "owl", "lora_path": str(tmp_path / "owl")})
        wanted = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}

        def ask(name: str, **fields: Any) -> dict[str, Any]:
            return client.post("/v1/completions", json={**wanted, "model": name, **fields}).json()["choices"][0]

        names = ("tiny", "pirate", "tiny:poet")
        answers = list(threads.map(ask, names))
        echoes = list(threads.map(partial(ask, echo=True, logprobs=1, max_tokens=0), names))

    assert loaded.status_code == 200
    assert (missing.status_code, "There is no adapter folder" in missing.text) == (400, True)
    texts = [answer["text"] for answer in answers]
    assert texts == [completion.text for completion in offline]
    assert len(set(texts)) == 3
    assert {echo["text"] for echo in echoes} == {PROMPT}
    for echo, completion in zip(echoes, offline, strict=True):
        first, *scores = echo["logprobs"]["token_logprobs"]
        assert first is None
        assert scores == pytest.approx([entry.chosen for entry in completion.prompt_logprobs], abs=1e-4)
