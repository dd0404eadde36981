"""Whatever is sent, the answer has the right status and a sentence, and the next request is served as ever."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from rota.core.config import ServerConfig
from tests.server.endless import endless_device
from tests.server.letters import error_of, has_ended, letters_device, serving

ROUTES = ["/v1/completions", "/v1/chat/completions"]
CHAT = '"messages": [{"role": "user", "content": "abc"}]'


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    device = letters_device()
    with serving(tmp_path_factory.mktemp("model"), device, ServerConfig(max_body_mb=1)) as client:
        yield client


@pytest.fixture(autouse=True)
def others_are_untouched(client) -> Iterator[None]:
    yield
    answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == "de"


def post(client: httpx.Client, body: str | bytes, route: str = "/v1/completions") -> httpx.Response:
    return client.post(route, content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("route", [*ROUTES, "/v1/tokenize", "/v1/detokenize", "/v1/load_lora_adapter"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "The body is not JSON"),
        (b"{", "The body is not JSON"),
        (b'{"prompt": "a",}', "The body is not JSON"),
        (b"[" * 100_000, "The body is not JSON"),
        (b"[]", "The body should be an object"),
        (b"null", "The body should be an object"),
        (b'{"prompt": "\xff\xfe"}', "The body is not JSON"),
        (b'{"prompt": "\\ud800"}', "The body is not JSON"),
        (b"\x00\x01\x02", "The body is not JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(client, route, body, words):
    response = post(client, body, route)

    assert response.status_code == 400
    assert words in error_of(response)["message"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("field", "words"),
    [
        ('"temperature": NaN', "temperature must be a finite number, not nan"),
        ('"temperature": Infinity', "temperature must be a finite number, not inf"),
        ('"temperature": 1e999', "temperature must be a finite number, not inf"),
        ('"temperature": null, "top_p": NaN', "top_p must be a finite number"),
        ('"temperature": true', "temperature should be a valid number"),
        ('"max_tokens": -5', "max_tokens must be at least 1, not -5"),
        ('"max_tokens": 1e3', "max_tokens should be a valid integer"),
        ('"max_tokens": 99999999999999999999999', "max_tokens should be less than or equal to 2147483647"),
        ('"top_k": 99999999999999999999999', "top_k should be less than or equal to 2147483647"),
        ('"seed": 99999999999999999999999', "seed must be between 0 and 9223372036854775807"),
        ('"seed": -1', "seed must be between 0 and"),
        ('"stop_token_ids": [99999999999999999999999]', "should be less than or equal to"),
        ('"n": 129', "n must be between 1 and 128"),
        ('"stop": ["a", ""]', "stop must be a list of strings that are not empty"),
        ('"stop": ["a", 1]', "stop.1 should be a valid string"),
        ('"stop": {"a": 1}', "stop must be a text or a list of texts"),
        ('"stop": ' + str(["x"] * 33).replace("'", '"'), "stop holds 33 texts; at most 32 are allowed"),
        ('"stop": "' + "x" * 1001 + '"', "stop holds a text of 1001 characters"),
        ('"stream": "yes"', "stream should be a valid boolean"),
        ('"model": 5', "model should be a valid string"),
        ('"model": ""', "There is no model or adapter named ''"),
        ('"Prompt[0]": 1', "'Prompt[0]' is not a field"),
        ('"color": {}', "'color' is not a field; the fields are logit_bias, allowed_token_ids,"),
        ('"max_token": 5', "'max_token' is not a field; the nearest is max_tokens."),
        ('"stream": true, "stream_options": {"usage": 1}', "'stream_options.usage' is not a field"),
    ],
)
def test_a_wrong_value_is_named_and_nothing_is_made_of_it(client, route, field, words):
    asked = CHAT if "chat" in route else '"prompt": "abc"'
    response = post(client, f"{{{asked}, {field}}}", route)

    assert response.status_code == (404 if "no model" in words else 400)
    assert words in error_of(response)["message"]
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        ('["a", 5]', "prompt.1", "prompt.1 must be a text, as prompt.0 is"),
        ('[[5], "a"]', "prompt.1", "prompt.1 must be a list of token ids, as prompt.0 is"),
        ("[5, true]", "prompt.1", "prompt.1 must be a token id, as prompt is a list of them"),
        ("[[5], [7, 300]]", "prompt.1.1", "prompt.1.1 is the token id 300"),
        ("[[5], []]", "prompt.1", "prompt.1 is empty"),
        ('["a", ""]', "prompt.1", "prompt.1 is empty"),
        ("[-1]", "prompt.0", "prompt.0 is the token id -1; ids lie between 0 and 255"),
        ("[99999999999999999999999]", "prompt.0", "ids lie between 0 and 255"),
        ("{}", "prompt", "prompt must be a text, a list of texts, a list of token ids or a list of such lists"),
        ("null", "prompt", "prompt must be a text"),
        (str([[7]] * 1025), "prompt", "prompt asks for 1025 answers in one call; ask for at most 1024"),
    ],
)
def test_a_prompt_that_is_none_is_refused(client, prompt, param, words):
    response = post(client, f'{{"prompt": {prompt}}}')

    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert words in error_of(response)["message"]


@pytest.mark.parametrize(("prompt", "param"), [("x" * 900_000, "prompt"), (["x", "x" * 900_000], "prompt.1")])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(client, prompt, param):
    response = client.post("/v1/completions", json={"prompt": prompt})

    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert error_of(response)["message"] == (
        "The prompt is too long: its 900000 characters cannot fit. This model's maximum context length is 200 tokens, "
        "and the answer needs at least one of them."
    )


@pytest.mark.parametrize("route", [*ROUTES, "/v1/tokenize", "/v1/load_lora_adapter"])
def test_a_body_over_the_limit_is_413_whether_it_says_its_length_or_not(client, route):
    too_large = b" " * (2**20 + 1)
    announced = post(client, too_large, route)
    streamed = client.post(route, content=iter([too_large[:1000]] * 2000))

    for response in (announced, streamed):
        assert response.status_code == 413
        assert error_of(response)["code"] == "body_too_large"
        assert "larger than 1 MB, the limit set by --max-body-mb" in error_of(response)["message"]


@pytest.mark.parametrize("field", ["prompt", "stop", "metadata", "messages", "stop_token_ids"])
def test_a_body_of_too_many_values_is_refused_before_they_become_objects(client, field):
    response = post(client, f'{{"{field}": [{"1," * 300_000}1]}}')

    assert response.status_code == 413
    assert "more than 270,000 values" in error_of(response)["message"]


def test_a_body_at_the_limit_is_read(client):
    body = b'{"prompt": "abc", "max_tokens": 2}'
    assert post(client, body + b" " * (2**20 - len(body))).status_code == 200


@pytest.mark.parametrize("route", [*ROUTES, "/generate", "/v1/tokenize", "/v1/load_lora_adapter"])
@pytest.mark.parametrize("encoding", ["br", "gzip, identity"])
def test_a_body_in_another_encoding_than_gzip_is_415_and_says_what_to_do(client, route, encoding):
    response = client.post(route, content=gzip.compress(b"{}"), headers={"Content-Encoding": encoding})

    assert response.status_code == 415
    assert error_of(response)["message"] == (
        f"POST {route}: the body is encoded as '{encoding}'; send it as gzip, or uncompressed."
    )


def test_a_body_that_says_it_is_not_encoded_is_read(client):
    body = {"prompt": "abc", "max_tokens": 2}
    assert client.post("/v1/completions", json=body, headers={"Content-Encoding": "identity"}).status_code == 200


PACKED = {"Content-Encoding": "gzip"}
SHORT = b'{"prompt": "abc", "max_tokens": 2}'


def in_pieces(body: bytes, size: int) -> Iterator[bytes]:
    return (body[begin : begin + size] for begin in range(0, len(body), size))


@pytest.mark.parametrize("route", ["/v1/completions", "/v1//completions"])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_body_may_be_packed_as_gzip_however_it_arrives(client, route, size):
    # More than a portion, and less than the limit.
    body = gzip.compress(SHORT + b" " * 700_000)
    answer = client.post(route, content=in_pieces(body[:50], size), headers=PACKED)
    assert answer.status_code == 400

    assert client.post(route, content=in_pieces(body, max(size, 100)), headers=PACKED).json()["usage"]["prompt_tokens"]
    assert client.post(route, content=in_pieces(gzip.compress(SHORT), size), headers=PACKED).status_code == 200


def test_a_body_that_is_small_only_while_it_is_packed_is_413(client):
    body = gzip.compress(b" " * (200 << 20))
    assert len(body) < 2**20
    answer = client.post("/v1/completions", content=body, headers=PACKED)

    assert answer.status_code == 413
    assert error_of(answer)["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (SHORT, "is none"),
        (gzip.compress(SHORT)[:-3], "ends too early"),
        (gzip.compress(SHORT) + b"more", "has more behind its end"),
        (gzip.compress(SHORT) * 2, "has more behind its end"),
        (b"", "ends too early"),
        (gzip.compress(b""), "not JSON"),
    ],
    # Packed bytes hold the time, so they are no names that all workers know.
    ids=["plain", "cut off", "longer", "twice", "nothing", "empty"],
)
def test_what_is_no_gzip_is_refused(client, body, words):
    answer = client.post("/v1/completions", content=body, headers=PACKED)

    assert (answer.status_code, words in error_of(answer)["message"]) == (400, True), answer.text


def test_a_body_without_content_that_never_ends_is_bounded(client):
    empty = zlib.compressobj(wbits=31)
    nothing = [empty.flush(zlib.Z_SYNC_FLUSH), *[b"\x00\x00\x00\xff\xff" * 50_000] * 8]
    answer = client.post("/v1/completions", content=iter(nothing), headers=PACKED)

    assert answer.status_code == 413


def test_a_client_that_leaves_a_packed_call_is_noticed(tmp_path):
    body = gzip.compress(json.dumps({"prompt": "a", "max_tokens": 100_000, "stream": True}).encode())
    with serving(tmp_path, endless_device()) as server:
        with server.stream("POST", "/v1/completions", content=body, headers=PACKED) as stream:
            lines = stream.iter_lines()  # httpx closes a stream whose lines are dropped
            next(lines)
        assert has_ended(server)


def test_a_mark_of_the_byte_order_is_no_part_of_a_body(client):
    assert post(client, b"\xef\xbb\xbf" + SHORT).status_code == 200


@pytest.mark.parametrize("path", ["//v1/completions", "/v1//completions", "///v1///completions"])
def test_two_slashes_are_one(client, path):
    answer = client.post(client.base_url.copy_with(raw_path=path.encode()), content=SHORT)

    assert answer.status_code == 200, answer.text


def test_slashes_in_the_name_of_an_adapter_stay(tmp_path):
    with serving(tmp_path, adapters=("a//b",)) as server:
        found = [
            server.get(server.base_url.copy_with(raw_path=path)) for path in (b"//v1//models/a//b", b"/v1/models/a/b")
        ]

    assert [answer.status_code for answer in found] == [200, 404]
    assert found[0].json()["id"] == "a//b"


def test_a_client_that_leaves_in_the_middle_of_its_body_troubles_nobody(client):
    address = urlsplit(str(client.base_url))
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt')


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("POST", "/v2/completions", 404)],
)
def test_a_wrong_path_or_method_has_the_same_shape(client, method, path, status):
    response = client.request(method, path)

    assert response.status_code == status
    assert path in error_of(response)["message"]
