"""SGLang's native routes, as its clients and its bench use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from fastapi import Request, Response

from rota.core.config import ServerConfig
from rota.runtime.registry import Registry
from rota.server.access.access import Right
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.context import AppContext
from rota.server.native.call import GenerateFields, NativeSampling
from rota.server.native.routes import health_within
from rota.server.route import get
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice, alphabet
from tests.server.applications import made_app, running
from tests.server.engines import REPLICAS, engines
from tests.server.letters import CONTEXT, Gate, error_of, events_in, events_of, serving
from tests.tiny_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="module")
def client(tmp_path_factory, device) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("letters"), device, adapters=("pirate", "poet")) as client:
        yield client


def generate(client: httpx.Client, max_new_tokens: int = 3, **fields: Any) -> Any:
    """The answer to "abc", or to what is given."""
    prompt = {} if "text" in fields or "input_ids" in fields else {"text": "abc"}
    body = {"sampling_params": {"max_new_tokens": max_new_tokens}, **prompt, **fields}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return events_of(answer) if fields.get("stream") else answer.json()


def test_one_prompt_is_answered_by_one_object(client):
    answer = generate(client, rid="mine")
    meta = answer["meta_info"]

    assert answer["text"] == "def"
    assert answer["output_ids"] == [100, 101, 102]
    assert meta.pop("e2e_latency") > 0.0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 0,
    }


def test_ids_are_prompts_as_well(client):
    assert generate(client, input_ids=[97, 98, 99])["text"] == "def"
    assert [answer["text"] for answer in generate(client, input_ids=[[97], [97, 98]])] == ["bcd", "cde"]


def test_a_list_is_answered_by_a_list_if_only_of_one(client):
    assert [answer["text"] for answer in generate(client, text=["abc", "a"])] == ["def", "bcd"]
    assert [answer["text"] for answer in generate(client, text=["abc"])] == ["def"]


def test_each_prompt_may_have_its_own_parameters_adapter_and_name(client, device):
    before = len(device.plans)
    answers = generate(
        client,
        text=["abc", "abc", "abc"],
        sampling_params=[{"max_new_tokens": length} for length in (1, 2, 3)],
        lora_path=["pirate", None, "poet"],
        rid=["one", "two", "three"],
    )

    assert [answer["text"] for answer in answers] == ["d", "de", "def"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["one", "two", "three"]
    assert sorted(seat.adapter_id for plan in device.plans[before:] for seat in plan.seats) == [0, 1, 2]


@pytest.mark.parametrize(("lora_path", "adapter"), [(None, 0), ("", 0), ("poet", 2), ("letters:pirate", 1)])
def test_one_adapter_counts_for_all_prompts(client, device, lora_path, adapter):
    before = len(device.plans)
    generate(client, text=["abc", "xyz"], lora_path=lora_path)

    assert [seat.adapter_id for plan in device.plans[before:] for seat in plan.seats] == [adapter, adapter]


def test_n_gives_each_prompt_so_many_answers(client):
    answers = generate(client, sampling_params={"max_new_tokens": 2, "n": 3}, rid="mine")

    assert [answer["text"] for answer in answers] == ["de"] * 3
    assert [answer["meta_info"]["id"] for answer in answers] == ["mine-0", "mine-1", "mine-2"]


def test_a_stream_tells_everything_again_with_every_token(tmp_path):
    body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 12}}
    with gated(tmp_path) as client, client.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        GATE.set()
        events = events_in([first, *lines])
    texts = [event["text"] for event in events]
    last = events[-1]

    assert len(events) > 1
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [len(event["output_ids"]) for event in events] == [len(text) for text in texts]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [len(text) for text in texts]
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    assert last["text"] == "".join(chr(alphabet([0] * length)) for length in range(3, 15))
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


def test_a_stream_of_several_says_whose_each_event_is(client):
    events = generate(client, text=["abc", "a"], stream=True)
    last = {event["index"]: event["text"] for event in events}

    assert last == {0: "def", 1: "bcd"}
    assert all("index" not in event for event in generate(client, stream=True))


def test_an_answer_says_what_ended_it(client):
    def ending(**sampling: Any) -> Any:
        return generate(client, sampling_params=sampling)["meta_info"]["finish_reason"]

    assert ending(stop=["fg"]) == {"type": "stop", "matched": "fg"}
    assert ending(stop_token_ids=[102]) == {"type": "stop", "matched": 102}
    assert generate(client, text="the end")["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


def test_log_probabilities_come_with_ids_and_with_texts_where_asked_for(client):
    plain = generate(client, return_logprob=True, max_new_tokens=2)["meta_info"]
    full = generate(
        client, return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True, stream=True, max_new_tokens=2
    )[-1]["meta_info"]

    assert plain["output_token_logprobs"] == [[-0.5, 100, None], [-0.5, 101, None]]
    assert "output_top_logprobs" not in plain
    assert full["output_token_logprobs"] == [[-0.5, 100, "d"], [-0.5, 101, "e"]]
    assert full["output_top_logprobs"][0] == [[-0.5, 100, "d"], [-1.5, 101, "e"]]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_logprobs_from_the_start_tell_of_the_prompt_too(client, is_streamed):
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    answer = generate(client, text="abc", max_new_tokens=1, stream=is_streamed, **fields)
    meta = (answer[-1] if is_streamed else answer)["meta_info"]

    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-0.5, 98, "b"], [-0.5, 99, "c"]]
    assert meta["input_top_logprobs"] == [None, [[-0.5, 98, "b"]], [[-0.5, 99, "c"]]]
    assert meta["output_token_logprobs"] == [[-0.5, 100, "d"]]


def test_what_the_bench_sends_is_answered(client):
    body = {
        "text": "abc",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True, "top_p": 1.0},
        "stream": True,
        "stream_options": {"include_usage": True},
        "lora_path": "",
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
        "image_data": None,
        "token_ids_logprob": None,
    }
    assert events_of(client.post("/generate", json=body))[-1]["text"] == "defg"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "text", "Send either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "text", "Send either text or input_ids"),
        ({"text": []}, "text", "empty list"),
        ({"text": 3}, "text", "text"),
        ({"text": ""}, "text", "text is empty"),
        ({"text": ["a", ""]}, "text.1", "text.1 is empty"),
        ({"text": ["a", 3]}, "text.1", "text.1 should be a valid string"),
        ({"text": "a", "lora_path": [3]}, "lora_path.0", "lora_path.0 should be a valid string"),
        ({"input_ids": "abc"}, "input_ids", "must be a list of token ids"),
        ({"input_ids": []}, "input_ids", "must be a list of token ids"),
        ({"input_ids": [1, "a"]}, "input_ids.1", "input_ids.1 must be a token id"),
        ({"input_ids": [100000]}, "input_ids.0", "ids lie between"),
        ({"input_ids": [[1], []]}, "input_ids.1", "input_ids.1 is empty"),
        ({"text": "a", "prompt": "b"}, "prompt", "'prompt' is not a field; the fields are text, input_ids"),
        (
            {"text": "a", "image_data": "x.png"},
            "image_data",
            "Rota does not support image_data; Rota reads and writes text alone.",
        ),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 3}, "logprob_start_len", "must be -1, for"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len", "needs return_logprob"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num", "needs return_logprob"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num", "between 0 and 20"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens", "is not a field"),
        ({"text": "a", "sampling_params": {"temperature": "x"}}, "sampling_params.temperature", "a valid number"),
        ({"text": "a", "sampling_params": {"stop": [1]}}, "sampling_params.stop.0", "should be a valid string"),
        ({"text": "a", "sampling_params": 5}, "sampling_params", "should be an object"),
        ({"text": "a", "sampling_params": [{"temperature": "x"}]}, "sampling_params.0.temperature", "a valid number"),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"temperature": -1}]},
            "sampling_params.1.temperature",
            "temperature must be between 0 and 100",
        ),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": 0}]}, "sampling_params.1.n", "between 1 and"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"regex": "a"}]}, "sampling_params.1.regex", "not support"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens", "at least 1"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature", "between 0 and 100"),
        (
            {"text": "a", "sampling_params": {"sampling_seed": -1}},
            "sampling_params.sampling_seed",
            "sampling_seed must",
        ),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "sampling_params.regex", "not support"),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"skip_special_tokens": False}]},
            "sampling_params",
            "must be the same for all prompts",
        ),
        ({"text": "a", "sampling_params": {"min_new_tokens": 200}}, "sampling_params.min_new_tokens", "between 0 and"),
        ({"text": "a", "sampling_params": {"logit_bias": {"256": 1}}}, "sampling_params.logit_bias.256", "ids lie"),
        ({"text": "a", "priority": 101}, "priority", "priority must be between -100 and 100"),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n", "between 1 and"),
        ({"text": ["a", "b"], "sampling_params": [{}, {}, {}]}, "sampling_params", "2 prompts but 3 sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params", "the same for all"),
        ({"text": ["a", "b"], "lora_path": ["poet", None, None]}, "lora_path", "2 prompts but 3 lora_path"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid", "must hold 2 different names, one per prompt"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "it holds 2 names, 1 of them different"),
        ({"text": "a", "rid": "no spaces"}, "rid", "rid must be 1 to 128 letters"),
        ({"text": ["a", "b"], "rid": ["x", "no spaces"]}, "rid.1", "rid.1 must be 1 to 128 letters"),
    ],
)
def test_what_cannot_be_is_400_and_names_the_field(client, fields, param, words):
    refused = client.post("/generate", json=fields)

    assert (refused.status_code, error_of(refused)["param"]) == (400, param)
    assert words in error_of(refused)["message"]


@pytest.mark.parametrize(("fields", "where"), [(GenerateFields, ""), (NativeSampling, "sampling_params.")])
def test_every_field_that_is_not_supported_is_refused_unless_it_says_nothing(client, fields, where):
    described = fields.model_json_schema()["properties"].items()
    names = [name for name, schema in described if "Not supported" in schema.get("description", "")]

    def answer(name: str, value: Any) -> httpx.Response:
        sampling = {"max_new_tokens": 1, **({name: value} if where else {})}
        return client.post(
            "/generate", json={"text": "a", "sampling_params": sampling, **({} if where else {name: value})}
        )

    assert len(names) > 1
    assert [error_of(answer(name, "x"))["param"] for name in names] == [where + name for name in names]
    assert all(answer(name, None).status_code == 200 for name in names)


LONG = CONTEXT + 1


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"text": "a", "lora_path": "owl"}, 404, "lora_path"),
        ({"text": ["a", "b"], "lora_path": ["poet", "owl"]}, 404, "lora_path.1"),
        ({"text": "a" * LONG}, 400, "text"),
        ({"text": ["a", "a" * LONG]}, 400, "text.1"),
        ({"text": ["a", "a" * LONG], "sampling_params": {"n": 2}}, 400, "text.1"),
        ({"text": "a" * 300 * LONG}, 400, "text"),
        ({"input_ids": [7] * LONG}, 400, "input_ids"),
        ({"input_ids": [[7], [7] * LONG]}, 400, "input_ids.1"),
    ],
)
def test_an_unknown_adapter_is_404_and_a_long_prompt_400_by_the_name_of_its_field(client, fields, status, param):
    refused = client.post("/generate", json=fields)

    assert (refused.status_code, error_of(refused)["param"]) == (status, param)


def test_operators_are_told_what_runs_here(client):
    info, server = client.get("/get_model_info").json(), client.get("/get_server_info").json()

    assert info == client.get("/model_info").json()
    assert (info["model_path"], info["is_generation"], info["context_length"]) == ("/models/letters", True, CONTEXT)
    assert server["loaded_adapters"] == {"pirate": "/adapters/pirate", "poet": "/adapters/poet"}
    assert (server["status"], len(server["replicas"])) == ("ready", REPLICAS)
    assert (server["max_running_requests"], server["max_total_num_tokens"]) == (8 * REPLICAS, 1024 * REPLICAS)
    assert (server["kv_block_size"], server["kv_cache_dtype"]) == (16, "bfloat16")
    assert (server["max_loras_per_batch"], server["lora_memory_bytes"]) == (2, 2_000_000)
    assert server["slots"] == {
        "count": 2,
        "from": "6 adapters at the start",
        "rank": 16,
        "rank_from": "the largest at the start",
        "pages": 0,
        "matrices": 0,
        "bytes": 2_000_000,
        "annexed": [],
        "warning": None,
    }
    assert len(server["internal_states"]) == REPLICAS
    for state in server["internal_states"]:
        assert (state["num_running_reqs"], state["kv_blocks_used"]) == (0, 0)
        assert (state["slots_open"], state["slot_pages"], state["slot_pages_used"]) == (2, 0, 0)
        assert state["age_s"] >= 0.0


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_flushed_cache_has_forgotten_earlier_prompts(client, method):
    prompt = "a prompt of more than sixteen tokens"

    def cached() -> int:
        return generate(client, text=prompt)["meta_info"]["cached_tokens"]

    cached()
    assert cached() == 32
    assert client.request(method, "/flush_cache").text.startswith("The cache is flushed: ")
    assert cached() == 0


def test_health_generate_makes_a_token(client, device):
    before = len(device.plans)

    assert client.get("/health_generate").json() == {"status": "ready"}
    assert any(plan.seats for plan in device.plans[before:])


def test_health_generate_gives_up_on_an_engine_that_makes_none(tmp_path):
    async def impatient(context: AppContext, http: Request) -> Response:
        return await health_within(0.2, context, http)

    service = engines(lambda: FakeDevice(next_token=lambda _: GATE([0] * 6)))
    registry, tokenizer = Registry("letters", "/models/letters"), Tokenizer(write_byte_tokenizer(tmp_path))
    GATE.clear()
    app = made_app(service, tokenizer, registry, more_routes=[get("/health_generate", Right.ANY, impatient)])
    with running(app) as url:
        service.wait_until_ready()
        answer = httpx.get(f"{url}/health_generate")
        GATE.set()

    assert (answer.status_code, answer.json()["reason"]) == (503, "No token came within 0.2 seconds.")


GATE = Gate()


@contextmanager
def gated(folder, keys: KeyRing | None = None, config: ServerConfig | None = None) -> Iterator[httpx.Client]:
    GATE.clear()
    with serving(folder, FakeDevice(next_token=GATE), config, keys) as client:
        try:
            yield client
        finally:
            GATE.set()


def test_a_request_is_aborted_by_its_name_and_says_so(tmp_path):
    with (
        gated(tmp_path) as client,
        client.stream(
            "POST",
            "/generate",
            json={"text": "abc", "rid": "mine", "stream": True, "sampling_params": {"max_new_tokens": 90}},
        ) as stream,
    ):
        lines = filter(None, stream.iter_lines())
        next(lines)
        assert client.post("/abort_request", json={"rid": "other"}).json() == {"aborted": 0}
        assert client.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
        GATE.set()
        *_, ending, done = lines

    assert '"finish_reason":{"type":"abort"' in ending
    assert done == "data: [DONE]"


def test_operators_are_told_the_last_known_state_while_a_step_takes_long(tmp_path):
    body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 9}}
    with gated(tmp_path) as client:
        before = client.get("/server_info").json()["internal_states"]
        with client.stream("POST", "/generate", json=body) as stream:
            next(stream.iter_lines())  # the engine is at the step that takes long, or about to begin it
            during = client.get("/server_info").json()["internal_states"]
            GATE.set()

    assert [state.keys() for state in during] == [state.keys() for state in before]
    assert all(state["age_s"] >= 0.0 for state in during)


def test_one_of_several_is_aborted_by_its_own_name(tmp_path):
    body = {"text": ["abc", "abc"], "rid": ["one", "two"], "stream": True, "sampling_params": {"max_new_tokens": 9}}
    with gated(tmp_path) as client, client.stream("POST", "/generate", json=body) as stream:
        lines = filter(None, stream.iter_lines())
        next(lines)
        assert client.post("/abort_request", json={"rid": "two"}).json() == {"aborted": 1}
        GATE.set()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if "[DONE]" not in line]

    endings = {event["meta_info"]["id"]: event["meta_info"]["finish_reason"] for event in events}
    assert {name: ending["type"] for name, ending in endings.items()} == {"one": "length", "two": "abort"}


def test_a_name_that_is_open_is_not_given_twice(tmp_path):
    body = {"text": ["abc", "abc"], "rid": ["one", "two"], "stream": True, "sampling_params": {"max_new_tokens": 90}}
    with gated(tmp_path) as client, client.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = client.post("/generate", json={"text": "abc", "rid": "two"})

    assert (refused.status_code, error_of(refused)["code"]) == (400, "duplicate_id")


@pytest.mark.parametrize("fields", [{}, {"rid": ""}, {"rid": "a", "abort_all": True}, {"abort_all": False}])
def test_an_abort_says_what_to_abort(client, fields):
    assert client.post("/abort_request", json=fields).status_code == 400


def test_a_tenant_aborts_its_own_requests_and_an_operator_all(tmp_path):
    ring = KeyRing(
        {digest_of(name): Key(name, may_operate=name == "operator") for name in ("acme", "birds", "operator")}
    )
    body = {"text": "abc", "rid": "acmes", "stream": True, "sampling_params": {"max_new_tokens": 90}}

    def abort(key: str, **fields: Any) -> int:
        return client.post("/abort_request", json=fields, headers={"x-api-key": key}).json()["aborted"]

    with (
        gated(tmp_path, ring) as client,
        client.stream("POST", "/generate", json=body, headers={"x-api-key": "acme"}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        assert (abort("birds", rid="acmes"), abort("birds", abort_all=True)) == (0, 0)
        assert (abort("acme", rid="acmes"), abort("operator", abort_all=True)) == (1, 1)
        GATE.set()
        assert '"finish_reason":{"type":"abort"' in list(filter(None, lines))[-2]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
def test_a_request_that_takes_longer_than_it_may_ends_with_an_error_even_if_the_engine_is_stuck(
    tmp_path, route, is_streamed
):
    body = {"text": "abc"} if route == "/generate" else {"prompt": "abc"}
    with gated(tmp_path, config=ServerConfig(request_timeout=1.0, stream_keep_alive=0.01)) as client:
        answer = client.post(route, json=body | {"stream": is_streamed})

    assert answer.status_code == (200 if is_streamed else 504)
    error = events_of(answer)[-1]["error"] if is_streamed else error_of(answer)
    assert error["code"] == "request_timed_out"
    assert error["message"] == "The request did not end within 1 seconds, the limit of this server."
