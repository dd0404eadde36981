"""What people type to see whether a server works."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.processes import run_program
from tests.server.letters import serving

Curl = Callable[..., str]

pytestmark = pytest.mark.skipif(
    shutil.which("curl") is None, reason="runs the curl command, which is not installed on this machine"
)


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), adapters=("pirate",)) as client:
        yield client


@pytest.fixture
def curl(client) -> Curl:
    def curl(path: str, *arguments: str) -> str:
        command = ["curl", "--silent", "--show-error", "--max-time", "20", f"{client.base_url}{path}", *arguments]
        return run_program(command).stdout

    return curl


def test_it_asks_without_saying_that_it_sends_json(curl):
    answer = curl("/v1/completions", "-d", '{"model": "pirate", "prompt": "abc", "max_tokens": 3}')

    assert json.loads(answer)["choices"][0]["text"] == "def"


def test_it_streams_a_chat(curl):
    asked = '{"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3, "stream": true}'
    events = curl("/v1/chat/completions", "-N", "-H", "Content-Type: application/json", "-d", asked).split("\n\n")

    assert events[0].startswith('data: {"id":"chatcmpl-')
    assert events[-2:] == ["data: [DONE]", ""]


def test_it_sees_status_and_sentence_of_an_error(curl):
    answer = curl("/v1/completions", "-w", "\n%{http_code}", "-d", '{"model": "parrot", "prompt": "abc"}')
    body, status = answer.rsplit("\n", 1)

    assert status == "404"
    assert "known are: letters, pirate" in json.loads(body)["error"]["message"]


def test_a_body_too_large_to_be_worth_sending_is_refused_before_it_is_sent(curl, tmp_path):
    """curl asks first with a body of this size, by 'Expect: 100-continue', and hears no."""
    (tmp_path / "body").write_bytes(b" " * (17 * 2**20))
    answer = curl("/v1/completions", "-w", "\n%{http_code} %{size_upload}", "--data-binary", f"@{tmp_path / 'body'}")

    status, sent = answer.rsplit("\n", 1)[1].split()
    assert status == "413"
    assert int(sent) < 17 * 2**20
