"""On a real model over HTTP, each field about tokens does what it says, on every route."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from rota.llm.config import build_device, engine_config
from rota.runtime.registry import Registry
from rota.text.tokenizer import Tokenizer
from tests.engine.model_factory import make_tiny_model
from tests.server.applications import made_app, running
from tests.server.engines import engines
from tests.server.letters import error_of
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S

LENGTH = 24
END = 2

Tokens = list[int]
Generate = Callable[..., Tokens]


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("tiny"))
    make_tiny_model(folder, "smollm2")
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 128, "max_running_requests": 8}
    config = engine_config({"model_path": str(folder), **options}, quiet=True)
    service = engines(partial(build_device, config), config)
    app = made_app(service, Tokenizer(folder), Registry("tiny", str(folder)))
    with running(app) as url, httpx.Client(base_url=url) as client:
        service.wait_until_ready(TIMEOUT_S)
        yield client


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
