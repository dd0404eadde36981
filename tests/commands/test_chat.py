"""A conversation in the terminal: who answers, how fast, and what happens when something goes wrong."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rota.cli import main
from rota.commands.chat.command import ChatConfig, chat
from rota.commands.chat.talk import AnswerClock, AnswerPiece
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.fakes import FakeDevice, alphabet
from tests.processes import Program, started
from tests.server.letters import letters_device, serving, steps_made
from tests.waiting import TIMEOUT_S, until


@pytest.fixture(scope="module")
def device() -> FakeDevice:
    return letters_device()


@pytest.fixture(scope="module")
def client(device, tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), device, adapters=("poet", "owl")) as client:
        yield client


@pytest.fixture
def say(client, monkeypatch, capsys):
    """What the program prints, and its exit code, for lines that are piped into it."""

    def say(*lines: str, arguments: tuple[str, ...] = (), url: str = "") -> tuple[str, str, int]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        with pytest.raises(SystemExit) as ended:
            main(["chat", "--base-url", url or str(client.base_url), "--max-tokens", "4", *arguments])
        out, err = capsys.readouterr()
        return out, err, int(ended.value.code or 0)

    return say


def prompts(device: FakeDevice) -> list[str]:
    seats = [seat for plan in device.plans for seat in plan.seats]
    return [bytes(seat.tokens[: seat.prompt_length]).decode() for seat in seats]


def test_one_message_gets_one_answer_and_the_program_ends(say):
    out, err, code = say(arguments=("--message", "ab"))

    assert (out, code) == ("defg\n", 0)
    # Tokens that come together have no speed.
    assert re.fullmatch(r"\(letters: first token after \d+ ms,( [\d.]+ tokens a second,)? 4 tokens\)\n", err)


def test_tokens_that_come_one_after_the_other_have_a_speed():
    clock = AnswerClock()
    assert len([*clock.watch(AnswerPiece(text) for text in "abc")]) == 3

    assert re.fullmatch(r"first token after \d+ ms, [\d.]+ tokens a second, 3 tokens", str(clock))


def test_every_line_of_a_pipe_is_a_message_of_one_conversation(say, device):
    device.plans.clear()
    out, _, code = say("ab", "", "c")

    assert (out, code) == ("defg\nklmn\n", 0)
    assert prompts(device) == ["ab|", "ab|defg|c|"]


def test_another_adapter_goes_on_with_the_same_conversation(say, device):
    device.plans.clear()
    out, err, _ = say("ab", "/adapter poet", "c", "/adapter 2", "/adapters", arguments=("--adapter", "owl"))

    assert out == "defg\nklmn\n"
    assert [line for line in err.splitlines() if "(" not in line] == [
        "owl answers from now on.",
        "poet answers from now on.",
        "owl answers from now on.",
        "  1  poet",
        "* 2  owl",
    ]
    assert "(owl: first" in err
    assert "(poet: first" in err
    assert len({seat.adapter_id for plan in device.plans for seat in plan.seats}) == 2


def test_what_the_model_is_told_comes_first_and_may_change(say, device):
    device.plans.clear()
    say("a", "/system sea", "b", "/system", "/clear", "c", arguments=("--system", "sky"))

    assert prompts(device) == ["sky|a|", "sea|a|ghij|b|", "c|"]


def test_a_message_may_begin_with_a_slash_and_have_several_lines(say, device):
    device.plans.clear()
    say("//etc", "one\\", "two")

    assert [prompt.split("|")[-2] for prompt in prompts(device)] == ["/etc", "one\ntwo"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/adapter pot", "rota: The server has no 'pot'; do you mean poet?\n"),
        ("/adapter zebra", "rota: The server has no 'zebra'; there are letters, poet, owl.\n"),
        ("/adapter", "rota: Name an adapter; there are letters, poet, owl.\n"),
        ("/dance", "rota: There is no command /dance; /help lists the commands.\n"),
        ("x" * 500, "maximum context length is 200 tokens, and the answer needs at least one of them.\n"),
    ],
)
def test_an_error_is_one_sentence_and_the_chat_goes_on(say, line, sentence):
    out, err, code = say(line, "ab")

    assert (out, code) == ("defg\n", 1)
    assert sentence in err
    assert "Traceback" not in err


def test_help_lists_every_command(say):
    _, err, _ = say("/help")

    assert {"/adapters", "/adapter", "/system", "/clear", "/help", "/quit"} <= {*err.split()}


def test_after_quit_nothing_is_asked(say):
    assert say("/quit", "ab")[0] == ""


def test_a_server_that_is_not_there_is_one_sentence(say):
    _, err, code = say(url="http://127.0.0.1:9")

    assert code == 1
    assert err.startswith("rota: The server at http://127.0.0.1:9 cannot be reached, or has gone: ")
    assert err.count("\n") == 1


def test_an_address_may_end_as_other_clients_write_it(say, client):
    assert say(arguments=("--message", "ab"), url=f"{client.base_url}/v1/")[0] == "defg\n"


def test_an_address_may_lack_its_scheme(say, client):
    assert say(arguments=("--message", "ab"), url=str(client.base_url).removeprefix("http://"))[0] == "defg\n"


@pytest.mark.parametrize("url", ["http://", ":30000", "http:/a b", "[::1"])
def test_what_is_no_address_is_one_sentence(say, url):
    _, err, code = say(url=url)
    assert (err.count("\n"), code) == (1, 1)
    assert err.startswith(f"rota: The server at {url} cannot be reached")


def test_a_key_is_sent_and_its_lack_is_told(say, tmp_path, monkeypatch):
    with serving(tmp_path, keys=KeyRing({digest_of("secret"): Key("me")})) as client:
        url = str(client.base_url)
        assert say(arguments=("--message", "ab", "--api-key", "secret"), url=url)[0] == "defg\n"
        _, err, code = say(arguments=("--message", "ab"), url=url)
        monkeypatch.setenv("ROTA_API_KEY", "secret")
        assert say(arguments=("--message", "ab"), url=url)[0] == "defg\n"
        assert "key" in say(arguments=("--message", "ab", "--api-key", "other"), url=url)[1]
    assert code == 1
    assert "key" in err


class Terminal:
    """A program in a terminal of its own: what is typed there, and what is seen."""

    def __init__(self, program: Program, place: int) -> None:
        self.program = program
        self._place = place
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._place, text.encode())

    def sees(self, words: str) -> bool:
        """Whether the words come in time, behind all that was seen by an earlier question."""

        def has_come() -> bool:
            try:
                self.seen += os.read(self._place, 4096).decode()
            except BlockingIOError:
                pass
            except OSError:  # the program has ended
                return words in self.seen
            return words in self.seen

        assert until(has_come), f"{words!r} did not come; what came is {self.seen!r}"
        self.seen = self.seen.partition(words)[2]
        return True


@contextmanager
def in_terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    command = [sys.executable, "-m", "rota", "chat", *arguments]

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that ctrl-C is a signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores it

    files = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "env": os.environ | {"TERM": "dumb"}}
    try:
        with started(command, preexec_fn=take_terminal, **files) as program:
            os.close(theirs)
            yield Terminal(program, ours)
    finally:
        os.close(ours)


def test_in_a_terminal_a_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path):
    was_stopped = threading.Event()

    def says(tokens: Sequence[int]) -> int:
        assert len(tokens) < 20 or was_stopped.wait(TIMEOUT_S)  # the answer cannot end before it is stopped
        return alphabet(tokens)

    device = letters_device(step_s=0.0)
    device.next_token = says
    with (
        serving(tmp_path, device, adapters=("poet",)) as client,
        in_terminal("--base-url", str(client.base_url)) as own,
    ):
        assert own.sees("letters (base model)")
        assert own.sees("poet")
        assert own.sees("letters> ")
        own.type("ab\n")
        assert own.sees("defg")
        own.type("\x03")
        assert own.sees("stopped)")
        was_stopped.set()
        assert own.sees("letters> ")
        assert steps_made(client, device) < 190, "the server was told that nobody wants the rest"
        own.type("\x03")
        assert own.sees("ends the chat.")
        own.type("/adapter poet\n")
        assert own.sees("poet> ")
        own.type("\x04")
        assert own.program.wait(TIMEOUT_S) == 0


def test_a_terminal_is_not_commanded_by_a_model(tmp_path: Path):
    device = letters_device(step_s=0.001)
    device.next_token = lambda _: 0x1B
    arguments = ("--max-tokens", "3", "--message", "a")
    with serving(tmp_path, device) as client, in_terminal("--base-url", str(client.base_url), *arguments) as own:
        assert own.sees("\ufffd\ufffd\ufffd")


def test_a_server_on_the_usual_port_is_asked(client, capsys):
    chat(ChatConfig(message="ab", max_tokens=4), usual_url=str(client.base_url))

    assert capsys.readouterr().out == "defg\n"


# Stands for Python: says what `rota serve` says, writes down how it was called, and ends with its parent.
OWN_SERVER = """#!/bin/sh
echo "$@" > {words}
echo "Rota serves letters at {url}"
exec tail --pid=$PPID -f /dev/null
"""


def test_without_a_server_one_with_the_built_in_model_is_started_for_the_chat(client, tmp_path, monkeypatch, capsys):
    python, words = tmp_path / "python", tmp_path / "words"
    python.write_text(OWN_SERVER.format(words=words, url=str(client.base_url).rstrip("/")))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    chat(ChatConfig(message="ab", adapter="poet", max_tokens=4), usual_url="http://127.0.0.1:9")

    out, err = capsys.readouterr()
    assert out == "defg\n"
    assert "so the built-in model is started" in err
    assert "poet answers from now on." in err
    assert words.read_text().endswith("-m rota serve --port 0 --quiet --drain-timeout 0\n")
