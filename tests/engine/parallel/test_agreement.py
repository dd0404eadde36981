"""A group of ranks gives every request what one rank gives it, whatever way the request takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from rota.core.adapter import Adapter, Extra
from rota.core.config import FirstAdapters
from rota.core.errors import AdapterError
from rota.core.grammar import Grammar
from rota.core.ids import AdapterId
from rota.core.plan import TokenLogprobs
from rota.core.request import Pooling
from rota.engine.families.table import read_spec
from rota.engine.folders.builtin import builtin_adapters, builtin_model_folder
from rota.engine.lora.base import BaseMatrices
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.model.sites import site_shapes
from rota.engine.parallel.shard import Shard
from rota.engine.weights.load import load_weights
from rota.text.tokenizer import Tokenizer
from tests.builders import request
from tests.engine.fake_grammars import FakeGrammars, obeys
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import FAMILIES, make_tiny_model
from tests.engine.parallel.ranks import OverlappedDevice, Ranks
from tests.engine.parallel.story import ADAPTERS, WAYS, GroupServer, Told, asked, play, told
from tests.engine.weights.writers import write_model
from tests.worlds import endings

# Three heads are for three ranks alone.
OVERRIDES = {"smollm2": {"hidden_size": 64, "num_attention_heads": 4}}
# At four ranks two have the same KV head. OLMo 2 also needs the squares of all heads.
HARDEST = "olmo2"
# What else a group computes in another way than one rank: biases, norms of heads, a KV head that all have, factors of
# residuals and logits, windows.
OTHERS = ("qwen2", "qwen3", "smollm2", "granite", "gemma3")
# An answer grows by more blocks than are left for it at its beginning, so that sequences are preempted at any speed.
NEW_TOKENS = 17


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


@pytest.mark.long("four processes build an engine each; two ranks are compared without")
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


# Ranks that read their parts of a folder in few bits answer as one rank does.


@pytest.mark.parametrize("layout", ["8: fine-grained", "4: GPTQ, by importance"])
def test_two_ranks_of_a_folder_in_few_bits_answer_as_one_does(layout, tmp_path, group_of):
    model = write_model(tmp_path / "model", layout)
    for number in range(1, ADAPTERS + 1):
        make_adapter(tmp_path / str(number), model, seed=number)
    one = play(GroupServer(tmp_path / "model", None), tmp_path, asked(8))
    two = play(GroupServer(tmp_path / "model", group_of(2)), tmp_path, asked(8))

    assert two.tokens == one.tokens
    assert two.failures == 0


# Ranks cut biases, magnitudes, the head's factors and own heads; behind a sum, only one rank adds a bias.

FEATURES = {
    1: {"use_dora": True, "target_modules": ["q_proj", "v_proj", "gate_proj"], "modules_to_save": ["lm_head"]},
    2: {"lora_bias": True, "bias": "all"},
    3: {"bias": "lora_only", "target_modules": ["q_proj", "o_proj", "lm_head", "embed_tokens"]},
}


@pytest.fixture(scope="module")
def with_features(tmp_path_factory):
    with_features = tmp_path_factory.mktemp("trims")
    model = make_tiny_model(with_features / "model", "granite", attention_bias=True, mlp_bias=True)
    for number, fields in FEATURES.items():
        make_adapter(with_features / str(number), model, seed=number, **fields)
    make_adapter(with_features / "summed", model, use_dora=True, target_modules=["o_proj"])
    return with_features


def test_two_ranks_with_every_feature_answer_as_one_does(with_features, group_of):
    first = FirstAdapters(count=3, rank=4, pages=3, extras=Extra.GAIN_BIAS | Extra.HEAD | Extra.EMBEDDING, matrices=2)
    one = play(GroupServer(with_features / "model", None, first=first), with_features, asked(8))
    two = play(GroupServer(with_features / "model", group_of(2), first=first), with_features, asked(8))
    assert two.tokens == one.tokens
    assert not one.failures
    assert not two.failures


def test_a_norm_over_rows_that_ranks_share_is_refused(with_features):
    spec, shard = read_spec(with_features / "model"), Shard(0, 2)
    weights = load_weights(with_features / "model", spec, torch.device("cpu"), torch.float32, quiet=True, shard=shard)
    base = BaseMatrices(weights.layers, site_shapes(shard.local(spec)), torch.float32, torch.device("cpu"))
    with pytest.raises(AdapterError, match="are cut between 2 ranks; serve it with --tensor-parallel-size 1"):
        read_checkpoint(with_features / "summed", spec, torch.float32, 8, shard=shard, base=base)


# Ranks follow grammars together, though rank 0 alone knows them and draws its steps late.

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    plain = tmp_path_factory.mktemp("guided")
    model = make_tiny_model(plain / "model", "llama3")
    for number in range(1, ADAPTERS + 1):
        make_adapter(plain / str(number), model, seed=number)
    return plain


KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "guided": {"grammar": Grammar("mod 7")},
    "limited": {
        "logit_bias": ((9, 4.0), (10, -4.0)),
        "allowed_token_ids": tuple(range(0, 250, 2)),
        "bad_words": ((8,), (12, 14)),
        "min_new_tokens": 3,
        "stop_token_ids": frozenset(range(0, 250, 8)),
    },
}


def test_two_ranks_under_grammars_and_limits_answer_as_one_does(plain, group_of):
    requests = [
        request(f"{way} {kind}", 5 + 9 * place, 7, adapter=AdapterId(place), **WAYS[way][0], **KINDS[kind])
        for place, way in enumerate(("greedy", "penalised", "all of it"))
        for kind in KINDS
    ]
    alone = GroupServer(plain / "model", None)
    alone.engine.use_grammars(FakeGrammars())
    one = play(alone, plain, requests)
    together = GroupServer(plain / "model", group_of(2))
    together.engine = OverlappedDevice(group_of(2), together.engine.capacity)
    two = play(together, plain, requests)

    assert two.tokens == one.tokens
    assert two.failures == 0
    assert all(obeys(tokens, 7) for id, tokens in two.tokens.items() if id.endswith("guided"))
    assert all(token % 2 == 0 for id, tokens in two.tokens.items() if id.endswith("limited") for token in tokens)


@pytest.mark.long("two processes more build an engine; what two ranks answer is compared without")
def test_two_ranks_pool_as_one_does(plain, group_of):
    requests = [
        request(f"{pooling} {length}", length, pooling=pooling) for pooling in POOLINGS for length in (1, 9, 50)
    ]
    one, two = (
        endings(GroupServer(plain / "model", ranks, kv_blocks=64).serve(requests)) for ranks in (None, group_of(2))
    )

    for id, end in one.items():
        assert two[id].embedding == pytest.approx(end.embedding, abs=1e-4)
