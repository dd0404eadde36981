"""Answers follow their grammars at any depth, and requests without one notice nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rota.core.errors import FaultCode
from rota.core.events import FinishReason, Preempted, SlotChanged, SlotReason
from rota.core.grammar import Grammar
from rota.core.plan import StepPlan
from rota.engine.drawing import Ticket
from tests.builders import request
from tests.engine.fake_grammars import FakeGrammars, obeys
from tests.engine.guided_story import ADAPTERS, MODULUS, GuidedServer, Watch, asked, logprobs
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.lora.mixed_server import adapter
from tests.engine.model_factory import make_tiny_model
from tests.worlds import endings, outputs

NEW_TOKENS = 14


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("guides")
    model = make_tiny_model(root / "model", "llama3")
    for number in range(1, ADAPTERS + 1):
        make_adapter(root / str(number), model, seed=number, r=4)
    return root


def served(made: Path, depth: int, requests: list, kv_blocks: int = 24) -> tuple[GuidedServer, Watch, list]:
    server = GuidedServer(made / "model", depth, kv_blocks)
    watch = Watch(server)
    server.add(*(adapter(number, made) for number in range(1, ADAPTERS + 1)))
    events = server.serve(requests)
    server.engine.close()
    return server, watch, events


@pytest.fixture(scope="module")
def at_depth_1(made: Path) -> list:
    """With rows and blocks enough for nearly all."""
    return served(made, 1, asked(NEW_TOKENS), kv_blocks=300)[2]


@pytest.fixture(scope="module")
def at_depth_2(made: Path) -> tuple[GuidedServer, Watch, list]:
    return served(made, 2, asked(NEW_TOKENS))


@pytest.fixture(scope="module")
def without_grammars(made: Path) -> list:
    return served(made, 2, asked(NEW_TOKENS, guides=lambda _: False), kv_blocks=300)[2]


def free(answers: dict) -> dict:
    return {id: tokens for id, tokens in answers.items() if id.startswith("free")}


def test_answers_are_the_same_at_depth_2_under_rotation_and_preemption(at_depth_1, at_depth_2, without_grammars):
    server, watch, events = at_depth_2
    answers = outputs(events)

    assert answers == outputs(at_depth_1)
    assert free(answers) == free(outputs(without_grammars)), "others' grammars are nobody's business"
    assert all(obeys(tokens, MODULUS) for id, tokens in answers.items() if id.startswith("guided"))
    assert not any(obeys(tokens, MODULUS) for tokens in free(answers).values())
    assert watch.waited > 20
    assert any(isinstance(event, Preempted) for event in events)
    assert any(isinstance(event, SlotChanged) and event.reason is SlotReason.TURN_OVER for event in events)
    assert max(server.grammars.fills) > 1


def test_logprobs_are_those_of_the_model_before_masks(at_depth_1, at_depth_2):
    found = logprobs(at_depth_2[2])
    right, tokens = logprobs(at_depth_1), outputs(at_depth_1)

    assert found.keys() == right.keys()
    for id, told in right.items():
        assert [one.chosen for one in found[id]] == pytest.approx([one.chosen for one in told], abs=1e-4)
    id = "guided penalised 0"
    unlikelier = [one.chosen < one.top[0][1] for one in right[id]]
    assert any(unlikelier), "a mask has forbidden the likeliest token"
    assert any(one.top[0][0] not in tokens[id] for one in right[id]), "which is told all the same"


def test_steps_without_a_grammar_never_wait(made):
    _, watch, _ = served(made, 2, asked(4, guides=lambda _: False))

    assert watch.steps > 4
    assert watch.waited == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_clients_that_leave_disturb_nobody(made, at_depth_1, depth):
    server = GuidedServer(made / "model", depth)
    server.add(*(adapter(number, made) for number in range(1, ADAPTERS + 1)))

    def leaves(id: str, written: int) -> bool:
        return id.endswith(("0", "2")) and written == 3

    answers = outputs(server.serve_aborting(asked(NEW_TOKENS), leaves))
    right = outputs(at_depth_1)
    server.engine.close()

    assert all(tokens == right[id][: len(tokens)] for id, tokens in answers.items())
    assert [id for id, tokens in answers.items() if len(tokens) < NEW_TOKENS] == [
        id for id in answers if id.endswith(("0", "2"))
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_is_complete_ends_the_answer(made, depth):
    grammar = Grammar("mod 7 then end 5")
    # It ends also where more tokens were asked for.
    guided = request("guided", 9, 30, grammar=grammar, stop_token_ids=frozenset({2}), min_new_tokens=10)
    _, _, events = served(made, depth, [guided, request("free", 9, 30)])
    answer = outputs(events)["guided"]

    assert endings(events)["guided"].reason is FinishReason.STOP
    assert len(answer) == 6
    assert answer[-1] == 2
    assert obeys(answer[:-1], 7)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("text", "tokens", "why"),
    [
        ("mod 7 then fault 4", 4, "The answer cannot follow its grammar: no token can follow four."),
        ("broken", 0, "The grammar is broken."),
    ],
)
def test_a_grammar_that_cannot_go_on_ends_its_request_alone(made, depth, text, tokens, why):
    asked_for = request("guided", 9, 12, grammar=Grammar(text, param="guided_regex"))
    others = [request("free", 9, 12), request("fine", 9, 12, grammar=Grammar("mod 7"))]
    _, _, alone = served(made, 1, others)
    _, _, events = served(made, depth, [asked_for, *others])
    ending = endings(events)["guided"]

    assert ending.reason is FinishReason.FAILED
    assert ending.fault is not None
    assert (ending.fault.code, ending.fault.message, ending.fault.param) == (FaultCode.BAD_FIELD, why, "guided_regex")
    assert len(outputs(events).get("guided", [])) == tokens
    assert {id: outputs(events)[id] for id in ("free", "fine")} == outputs(alone)


def test_an_engine_without_grammars_says_so(made):
    server = GuidedServer(made / "model", 2)
    server.engine._drawing.guides._grammars = None
    events = server.serve([request("guided", 5, 4, grammar=Grammar("mod 7")), request("free", 5, 4)])
    server.engine.close()

    assert "without grammars" in str(endings(events)["guided"].fault)
    assert len(outputs(events)["free"]) == 4


def test_a_matcher_is_made_while_the_prompt_is_computed(made):
    server = GuidedServer(made / "model", 2)
    server.engine.prepare = lambda *_: False
    submit = server.engine.submit
    begun: list[StepPlan] = []

    def noted(plan: StepPlan) -> Ticket:
        if any(chunk.samples for chunk in plan.chunks):
            server.grammars.release()  # only the step that draws may wait for it
        begun.append(plan)
        return submit(plan)

    server.engine.submit = noted
    events = server.serve([request("guided", 60, 4, grammar=Grammar("held mod 7"))])
    server.engine.close()

    assert sum(bool(plan.chunks) for plan in begun) == 3
    assert obeys(outputs(events)["guided"], 7)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_slow_grammar_makes_nobody_else_late(made, depth):
    """It is ready only when all others have ended; two more requests have the same one."""
    server = GuidedServer(made / "model", depth)
    slow = [request(f"slow {number}", 9, 5, grammar=Grammar("held mod 7")) for number in range(3)]
    others = [request("free", 9, 12), request("quick", 9, 12, grammar=Grammar("mod 7"))]
    complete: set[str] = set()

    def release(id: str, written: int) -> bool:
        if written == 12:
            complete.add(id)
        if len(complete) == len(others):
            server.grammars.release()
        return False

    events = server.serve_aborting([*slow, *others], release)
    server.engine.close()

    assert set(list(endings(events))[:2]) == {"free", "quick"}
    assert all(len(outputs(events)[one.request_id]) == 5 for one in slow)
    assert all(obeys(outputs(events)[id], 7) for id in ("slow 0", "slow 1", "slow 2", "quick"))


def test_a_row_whose_logits_are_not_numbers_ends_under_a_grammar_too(made):
    server = GuidedServer(made / "model", 2)
    model = server.engine._model
    logits_of = model.logits

    def broken(hidden: Tensor, *rest: Any) -> Tensor:
        logits = logits_of(hidden, *rest)
        logits[:, 1] = torch.nan  # the grammar forbids it, and still nothing means anything
        return logits

    model.logits = broken
    events = server.serve([request("guided", 5, 4, grammar=Grammar("mod 7"))])
    server.engine.close()

    fault = endings(events)["guided"].fault
    assert fault is not None
    assert fault.code is FaultCode.NOT_A_NUMBER


def test_the_fake_notices_a_token_that_was_lost_or_told_twice():
    grammars = FakeGrammars()
    whole = grammars.matcher(Grammar("mod 7"))
    whole.accept((7, 8, 16))
    lost, twice = grammars.matcher(Grammar("mod 7")), grammars.matcher(Grammar("mod 7"))
    lost.accept((7, 16))
    twice.accept((7, 8, 8, 16))

    assert len({tuple(one.allowed(256)) for one in (whole, lost, twice)}) == 3
