"""A group of ranks gives every request what one rank gives it, whatever way the request takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId
from rota.core.plan import TokenLogprobs
from rota.engine.folders.builtin import builtin_adapters, builtin_model_folder
from rota.text.tokenizer import Tokenizer
from tests.builders import request
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import FAMILIES, make_tiny_model
from tests.engine.parallel.ranks import Ranks
from tests.engine.parallel.story import ADAPTERS, GroupServer, Told, asked, play, told

# Three heads are for three ranks alone.
OVERRIDES = {"smollm2": {"hidden_size": 64, "num_attention_heads": 4}}
# At four ranks two have the same KV head. OLMo 2 also needs the squares of all heads.
HARDEST = "olmo2"
# What else a group computes in another way than one rank: biases, norms of heads, a KV head that all have, factors of
# residuals and logits, windows.
OTHERS = ("qwen2", "qwen3", "smollm2", "granite", "gemma3")
NEW_TOKENS = 9


@dataclass(frozen=True)
class Tiny:
    """A tiny model of a family, its adapters, and what one rank answers."""

    folder: Path
    adapters: Path
    one: Told


@pytest.fixture(scope="module")
def tiny_of(tmp_path_factory):
    made: dict[str, Tiny] = {}

    def tiny(family: str) -> Tiny:
        if family not in made:
            folder, adapters = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("adapters")
            model = make_tiny_model(folder, family, **OVERRIDES.get(family, {}))
            for number in range(1, ADAPTERS + 1):
                make_adapter(adapters / str(number), model, seed=number, r=2 * number)
            made[family] = Tiny(folder, adapters, play(GroupServer(folder, None), adapters, asked(NEW_TOKENS)))
        return made[family]

    return tiny


def assert_agrees(tiny: Tiny, ranks: Ranks) -> Told:
    """The ranks' tokens are compared in every step; here those of rank 0 are compared with one rank's."""
    many = play(GroupServer(tiny.folder, ranks), tiny.adapters, asked(NEW_TOKENS))
    assert many.tokens == tiny.one.tokens
    assert many.failures == 0
    assert_close(many.logprobs, tiny.one.logprobs)
    assert_close(many.scores, tiny.one.scores)
    return many


def assert_close(found: dict[str, list[TokenLogprobs]], right: dict[str, list[TokenLogprobs]]) -> None:
    assert found.keys() == right.keys()
    assert right, "the story asks for some"
    for id in right:
        assert [one.chosen for one in found[id]] == pytest.approx([one.chosen for one in right[id]], abs=1e-4)
        assert [[token for token, _ in one.top] for one in found[id]] == [
            [token for token, _ in one.top] for one in right[id]
        ]


@pytest.mark.parametrize(
    "family",
    [
        *OTHERS,
        *(
            pytest.param(family, marks=pytest.mark.long("Ranks share its parts as they share those of other families."))
            for family in FAMILIES
            if family not in OTHERS
        ),
    ],
)
def test_two_ranks_answer_as_one_does(family, tiny_of, group_of):
    assert_agrees(tiny_of(family), group_of(2))


@pytest.mark.parametrize("family", ["qwen3", "smollm2"])
def test_two_ranks_with_keys_and_values_in_eight_bits_answer_as_one_does(family, tiny_of, group_of):
    """Of SmolLM2's one KV head each rank has a copy; of Qwen's two each has one."""
    tiny = tiny_of(family)
    one, two = (
        play(GroupServer(tiny.folder, ranks, kv_cache_dtype="fp8"), tiny.adapters, asked(NEW_TOKENS))
        for ranks in (None, group_of(2))
    )
    assert two.tokens == one.tokens
    assert one.logprobs != tiny.one.logprobs, "eight bits show"


def test_four_ranks_answer_as_one_does(tiny_of, group_of):
    many = assert_agrees(tiny_of(HARDEST), group_of(4))

    assert many.preemptions > 0
    assert many.turns + tiny_of(HARDEST).one.turns > 0


@pytest.mark.long("four ranks take turns on two processors")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != HARDEST])
def test_four_ranks_answer_as_one_does_for_every_family(family, tiny_of, group_of):
    assert_agrees(tiny_of(family), group_of(4))


QUESTIONS = ("The capital of France is", "Water boils at", "Once upon a time, in a small village by the sea,")


def serve_builtin(ranks: Ranks | None, new_tokens: int, **model: str) -> Told:
    server = GroupServer(None, ranks, kv_blocks=40, **model)
    folders = builtin_adapters()
    named = enumerate(("pirate", "haiku"), start=1)
    server.add(*(Adapter(adapter_id=AdapterId(number), name=name, path=str(folders[name])) for number, name in named))
    tokenizer = Tokenizer(builtin_model_folder(quiet=True))
    requests = [
        request(f"q{number}", prompt=tokenizer.encode(question), max_new_tokens=new_tokens, adapter=AdapterId(number))
        for number, question in enumerate(QUESTIONS)
    ]
    answered = told(server.serve(requests))
    server.engine.close()
    return answered


@pytest.mark.long("three ranks of a real model")
def test_three_ranks_answer_as_one_does_with_the_built_in_model(group_of):
    """Nine heads and three KV heads: no other number divides them."""
    one, three = serve_builtin(None, 24), serve_builtin(group_of(3), 24)

    assert three.tokens == one.tokens
    assert [len(tokens) for tokens in one.tokens.values()] == [24, 24, 24]


@pytest.mark.long("three ranks of a real model")
def test_three_ranks_of_the_built_in_model_agree_with_each_other_in_four_bits(group_of):
    """On ARM each rank rounds its own inputs to eight bits, so one rank's answers differ in time."""
    one, three = (serve_builtin(ranks, 16, dtype="auto", quantization="int4") for ranks in (None, group_of(3)))

    assert three.failures == 0
    assert [len(tokens) for tokens in three.tokens.values()] == [16, 16, 16]
    assert [tokens[0] for tokens in three.tokens.values()] == [tokens[0] for tokens in one.tokens.values()]
