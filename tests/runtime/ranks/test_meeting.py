"""Ranks find each other, and go on only if they are alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from rota.core.config import EngineConfig, ModelConfig
from rota.core.errors import ConfigError, EngineDiedError
from rota.runtime.ranks import meeting as module
from rota.runtime.ranks.follower import arrive
from rota.runtime.ranks.lead import agree
from rota.runtime.ranks.meeting import Meeting, Welcome, difference, facts, open_line
from rota.runtime.ranks.processes import FollowerJob, torchrun_place
from tests.builders import capacity
from tests.fakes import FakeDevice
from tests.runtime.ranks.rank_devices import config_of
from tests.waiting import TIMEOUT_S

# ── the place that torchrun gives ─────────────────────────────────────────────────────────────────────────────────────

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "first.example",
    "MASTER_PORT": "29400",
}


def test_torchruns_environment_says_which_rank_a_process_is_and_where_rank_0_waits():
    place = torchrun_place(4, TORCHRUN)

    assert (place.rank, place.device_number, place.local_ranks) == (3, 1, 2)
    assert place.address == "tcp://first.example:29401"  # torchrun itself listens on MASTER_PORT


@pytest.mark.parametrize(("size", "environ"), [(1, TORCHRUN), (4, {}), (4, {"RANK": "0"}), (4, {"WORLD_SIZE": "4"})])
def test_without_torchrun_or_with_one_device_there_is_no_such_place(size, environ):
    assert torchrun_place(size, environ) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"WORLD_SIZE": "8"}, "tensor_parallel_size is 4, but WORLD_SIZE is 8: start 4 processes, or unset RANK"),
        ({"RANK": "first"}, "RANK must be a whole number, not 'first'"),
        ({"MASTER_PORT": ""}, "RANK and WORLD_SIZE are set, but MASTER_PORT is not"),
        ({"MASTER_ADDR": ""}, "RANK and WORLD_SIZE are set, but MASTER_ADDR is not"),
    ],
)
def test_an_environment_that_cannot_work_is_refused_with_a_sentence(change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        torchrun_place(4, {**TORCHRUN, **change})


# ── what is compared ──────────────────────────────────────────────────────────────────────────────────────────────────


def model_in(folder: Path, weights: bytes = b"w" * 500_000, config: str = "{}") -> EngineConfig:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)
    return EngineConfig(model=ModelConfig(model_path=str(folder), tensor_parallel_size=2))


def test_the_same_model_in_another_folder_is_the_same(tmp_path):
    here, there = model_in(tmp_path / "here"), model_in(tmp_path / "there")

    assert difference(facts(here), {1: facts(replace(there, rank=1, device_number=1))}) == ""


def test_another_fine_tune_of_the_same_shape_differs_in_its_weights(tmp_path):
    own = facts(model_in(tmp_path / "here"))
    other = facts(model_in(tmp_path / "there", weights=b"v" * 500_000))

    sentence = difference(own, {1: own, 2: other})
    assert "rank 2 has" in sentence
    assert "for the model's weights" in sentence
    assert "rank 1" not in sentence


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_only_weights_that_are_read_are_compared(tmp_path, load_format):
    config = model_in(tmp_path / "here")
    config = replace(config, model=replace(config.model, load_format=load_format))
    before = facts(config)
    (tmp_path / "here" / "model.safetensors").write_bytes(b"short")

    assert (facts(config) == before) == (load_format == "dummy")


def test_another_config_and_other_flags_are_named_with_both_values(tmp_path):
    here = model_in(tmp_path / "here")
    there = model_in(tmp_path / "there", config='{"layers": 3}')
    there = replace(there, model=replace(there.model, dtype="float32"))

    sentence = difference(facts(here), {1: facts(there)})
    assert "rank 1 has float32 for --dtype, and rank 0 has auto" in sentence
    assert "for the model's config.json" in sentence
    assert "weights" not in sentence


def test_another_version_is_named(tmp_path, monkeypatch):
    config = model_in(tmp_path / "here")
    own = facts(config)
    assert "the version of torch" in own
    monkeypatch.setattr(module.metadata, "distributions", lambda **_: [SimpleNamespace(version="0.0.1")])

    assert "rank 1 has 0.0.1 for the version of torch" in difference(own, {1: facts(config)})


def test_a_library_that_one_rank_lacks_is_named(tmp_path):
    own = facts(model_in(tmp_path / "here"))
    without = {name: word for name, word in own.items() if name != "the version of torch"}

    assert "rank 1 has nothing for the version of torch" in difference(own, {1: without})


def test_a_folder_that_is_missing_is_left_to_the_engine(tmp_path):
    assert facts(EngineConfig(model=ModelConfig(model_path=str(tmp_path / "no"))))


# ── the meeting ───────────────────────────────────────────────────────────────────────────────────────────────────────

SECRET = "known to the ranks"


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def meeting_of(size: int, context: zmq.Context[Any]) -> Meeting:
    return Meeting(context, size, "tcp://127.0.0.1:*", SECRET)


class Guest(threading.Thread):
    """A rank that comes to a meeting."""

    def __init__(self, context: zmq.Context[Any], meeting: Meeting, config: EngineConfig, secret: str = SECRET) -> None:
        super().__init__(daemon=True)
        self._plans = open_line(context, zmq.DEALER)
        self._plans.connect(meeting.address)
        self._job = FollowerJob(make_device=FakeDevice, config=config, address="there", secret=secret, meet_s=TIMEOUT_S)
        self.answer: Welcome | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = arrive(self._plans, self._job)
        except ConfigError as error:
            self.answer = error
        except zmq.ZMQError:
            pass  # the test has ended


def guest(context: zmq.Context[Any], meeting: Meeting, rank: int, size: int, **fields: Any) -> Guest:
    return Guest(context, meeting, replace(config_of(size), rank=rank), **fields)


def no_complaint() -> str:
    return ""


def test_ranks_that_are_alike_are_welcomed_by_names_of_their_own(context):
    meeting = meeting_of(3, context)
    guests = [guest(context, meeting, rank, 3) for rank in (2, 1)]

    meeting.gather(no_complaint, TIMEOUT_S)
    meeting.compare(facts(config_of(3)))
    names = meeting.welcome("tcp://engines:1", "tcp://reports:2")

    for each in guests:
        each.join(TIMEOUT_S)
    assert {names[each.answer.name] for each in guests} == {1, 2}
    assert {(each.answer.meeting, each.answer.reports) for each in guests} == {("tcp://engines:1", "tcp://reports:2")}


def test_a_rank_that_does_not_arrive_is_named(context):
    meeting = meeting_of(4, context)
    guest(context, meeting, 2, 4)

    with pytest.raises(EngineDiedError, match="Ranks 1, 3 did not arrive within 1 seconds"):
        meeting.gather(no_complaint, 1.0)


def test_a_process_that_ends_before_it_arrives_is_not_waited_for(context):
    with pytest.raises(EngineDiedError, match="killed"):
        meeting_of(2, context).gather(lambda: "It was killed.", TIMEOUT_S)


def test_a_stranger_is_not_heard(context):
    meeting = meeting_of(2, context)
    guest(context, meeting, 1, 2, secret="a guess")

    with pytest.raises(EngineDiedError, match=r"Rank 1 did not arrive within 0\.5 seconds"):
        meeting.gather(no_complaint, 0.5)


@pytest.mark.parametrize(("rank", "size"), [(1, 3), (2, 2)])
def test_a_rank_of_another_group_is_refused_and_told_so(context, rank, size):
    meeting = meeting_of(2, context)
    other = guest(context, meeting, rank, size)

    sentence = f"Rank {rank} of {size} came to a meeting of 2 ranks"
    with pytest.raises(ConfigError, match=sentence):
        meeting.gather(no_complaint, TIMEOUT_S)
    other.join(TIMEOUT_S)
    assert sentence in str(other.answer)


def test_ranks_with_other_flags_are_refused_and_all_are_told_which_differs_in_what(context):
    meeting = meeting_of(3, context)
    other = replace(config_of(3, dtype="float16"), rank=2)
    guests = [guest(context, meeting, 1, 3), Guest(context, meeting, other)]
    meeting.gather(no_complaint, TIMEOUT_S)

    sentence = "rank 2 has float16 for --dtype, and rank 0 has auto"
    with pytest.raises(ConfigError, match=sentence):
        meeting.compare(facts(config_of(3)))
    for each in guests:
        each.join(TIMEOUT_S)
        assert sentence in str(each.answer)


def test_a_port_that_is_taken_is_named(context):
    holder = meeting_of(2, context)
    with pytest.raises(ConfigError, match=f"cannot wait for the other ranks at {holder.address}"):
        Meeting(context, 2, holder.address)


def test_ranks_hold_what_the_smallest_can_hold():
    agreed = agree({0: capacity(blocks=90, slots=4), 1: capacity(blocks=70, slots=4), 2: capacity(blocks=80, slots=3)})

    assert agreed == replace(capacity(blocks=70, slots=3), ranks=3)


def test_ranks_that_differ_in_more_than_room_are_refused():
    with pytest.raises(ConfigError, match="rank 1 has 3 for rows, and rank 0 has 8"):
        agree({0: capacity(rows=8), 1: capacity(rows=3)})
