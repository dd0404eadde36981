"""Each rank's part of a model: the parts make up the whole, and what cannot be cut is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rota.core.errors import AdapterError, ConfigError
from rota.engine.families.table import read_spec
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.lora.host import stacked_sites
from rota.engine.model.sites import site_shapes
from rota.engine.parallel.group import ONE_RANK
from rota.engine.parallel.shard import Shard, sizes_for
from rota.engine.weights.load import dummy_weights, load_weights, weight_bytes
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With biases everywhere, four heads and two KV heads."""
    folder = tmp_path_factory.mktemp("model")
    model = make_tiny_model(
        folder, "smollm2", attention_bias=True, mlp_bias=True, hidden_size=64, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    make_adapter(folder / "adapter", model, r=4)
    return folder


def parts_of(folder, size):
    return [
        load_weights(folder, read_spec(folder), CPU, torch.float32, True, shard=Shard(r, size)) for r in range(size)
    ]


def test_a_rank_has_its_share_of_heads_and_of_the_mlp(folder):
    whole = read_spec(folder)
    local = Shard(1, 2).local(whole)

    assert (local.heads, local.kv_heads, local.kv_copies, local.intermediate_size) == (2, 1, 1, 56)
    assert (local.hidden_size, local.head_dim, local.vocab_size) == (64, 16, 256)
    assert Shard().local(whole) is whole


def test_ranks_share_a_kv_head_where_there_are_fewer_of_them(folder):
    whole = read_spec(folder)
    local = Shard(3, 4).local(whole)
    cuts = [Shard(rank, 4).cut("model.layers.0.self_attn.k_proj.weight", whole) for rank in range(4)]

    assert (local.heads, local.kv_heads, local.kv_copies) == (1, 1, 2)
    assert [(cut.first, cut.end) for cut in cuts] == [(0, 16), (0, 16), (16, 32), (16, 32)]


def test_the_ranks_products_add_up_to_the_whole_product_and_its_bias(folder):
    whole = load_weights(folder, read_spec(folder), CPU, torch.float32, True)
    x = torch.randn(3, 64)
    for size in (2, 4):
        parts = parts_of(folder, size)
        attended, inner = torch.randn(3, 64), torch.randn(3, 112)
        for index, layer in enumerate(whole.layers):
            own = [part.layers[index] for part in parts]
            output = sum(one.output(x) for one, x in zip(own, attended.chunk(size, 1), strict=True))
            down = sum(one.down(x) for one, x in zip(own, inner.chunk(size, 1), strict=True))
            torch.testing.assert_close(output, layer.output(attended))
            torch.testing.assert_close(down, layer.down(inner))
            gates, ups = zip(*(one.gate_up(x).chunk(2, 1) for one in own), strict=True)
            torch.testing.assert_close(torch.cat((*gates, *ups), 1), layer.gate_up(x))
        torch.testing.assert_close(torch.cat([part.head(x) for part in parts], 1), whole.head(x))


def test_queries_keys_and_values_of_a_rank_are_those_of_its_heads(folder):
    whole = load_weights(folder, read_spec(folder), CPU, torch.float32, True)
    x = torch.randn(3, 64)
    queries, keys, values = whole.layers[0].qkv(x).split([64, 32, 32], 1)
    for rank, part in enumerate(parts_of(folder, 4)):
        stretch, shared = slice(16 * rank, 16 * rank + 16), slice(16 * (rank // 2), 16 * (rank // 2) + 16)
        right = torch.cat((queries[:, stretch], keys[:, shared], values[:, shared]), 1)
        torch.testing.assert_close(part.layers[0].qkv(x), right)


def test_a_rank_holds_half_of_the_matrices_and_the_whole_embedding(folder):
    spec = replace(read_spec(folder), has_tied_embeddings=False)
    embedding = 4 * 256 * 64
    whole, half = weight_bytes(spec, torch.float32), weight_bytes(spec, torch.float32, Shard(0, 2))

    assert 0.48 < (half - embedding) / (whole - embedding) < 0.52


def test_dummy_weights_are_the_same_model_on_any_number_of_ranks(folder):
    spec = read_spec(folder)
    whole = dummy_weights(spec, CPU, torch.float32)
    halves = [dummy_weights(spec, CPU, torch.float32, shard=Shard(rank, 2)) for rank in range(2)]
    x = torch.randn(3, 64)

    torch.testing.assert_close(torch.cat([half.head(x) for half in halves], 1), whole.head(x))
    summed = sum(half.layers[1].output(part) for half, part in zip(halves, x.chunk(2, 1), strict=True))
    torch.testing.assert_close(summed, whole.layers[1].output(x))


def test_an_adapter_s_parts_make_up_the_adapter(folder):
    spec = read_spec(folder)

    def sites(shard: Shard):
        adapter = read_checkpoint(folder / "adapter", spec, torch.float32, 8, shard=shard)
        local = shard.local(spec)
        return stacked_sites(adapter.pieces[0], site_shapes(local), local.layers, adapter.site_ranks)

    (qkv, o, gate_up, down), halves = sites(Shard()), [sites(Shard(rank, 2)) for rank in range(2)]
    for one in halves:
        assert torch.equal(one[0].a, qkv.a)
        assert torch.equal(one[2].a, gate_up.a)
        assert torch.equal(one[1].b, o.b)
        assert torch.equal(one[3].b, down.b)
    assert torch.equal(torch.cat([one[1].a for one in halves], 3), o.a)
    assert torch.equal(torch.cat([one[3].a for one in halves], 3), down.a)
    gates, ups = zip(*(one[2].b.chunk(2, 2) for one in halves), strict=True)
    assert torch.equal(torch.cat((*gates, *ups), 2), gate_up.b)
    parts = zip(*(one[0].b.split([32, 16, 16], 2) for one in halves), strict=True)
    assert torch.equal(torch.cat([each for part in parts for each in part], 2), qkv.b)


def test_an_adapter_of_another_model_is_refused_with_the_whole_model_s_sizes(folder, tmp_path):
    other = make_tiny_model(tmp_path / "other", "llama2", intermediate_size=56)
    make_adapter(tmp_path / "adapter", other, target_modules=["down_proj"])

    with pytest.raises(AdapterError, match="this model's down_proj has 112 inputs"):
        read_checkpoint(tmp_path / "adapter", read_spec(folder), torch.float32, 8, shard=Shard(0, 2))


@pytest.mark.parametrize("size", [3, 8])
def test_a_size_that_does_not_divide_the_model_is_refused_with_those_that_do(size, folder):
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size is {size}.* 4 heads.*Sizes that can: 1, 2, 4\.$"):
        Shard(0, size).local(read_spec(folder))


def test_the_built_in_model_s_nine_heads_are_for_three_ranks(folder):
    spec = replace(read_spec(folder), heads=9, kv_heads=3, intermediate_size=1536, vocab_size=49152)

    assert list(sizes_for(spec)) == [1, 3]


@given(st.integers(1, 16), st.integers(0, 300_000))
def test_every_token_is_one_rank_s_and_the_first_ranks_have_the_most(size, more):
    vocabulary = size**2 + more
    cuts = [Shard(rank, size).tokens(vocabulary) for rank in range(size)]

    assert [cut.first for cut in cuts[1:]] == [cut.end for cut in cuts[:-1]]
    assert (cuts[0].first, cuts[-1].end) == (0, vocabulary)
    lengths = [cut.end - cut.first for cut in cuts]
    assert len(set(lengths[:-1])) <= 1
    assert 0 < lengths[-1] <= lengths[0]


def test_the_bias_behind_a_sum_is_rank_0_s(folder):
    tensors = load_file(folder / "model.safetensors")
    bias = "model.layers.0.self_attn.o_proj.bias"

    assert (Shard(0, 2).holds(bias), Shard(1, 2).holds(bias)) == (True, False)
    first, second = parts_of(folder, 2)
    assert torch.equal(first.layers[0].output(torch.zeros(1, 32))[0], tensors[bias])
    assert not second.layers[0].output(torch.zeros(1, 32)).any()


def test_one_rank_does_nothing():
    x = torch.randn(3)

    assert ONE_RANK.sum(x) is x
    assert ONE_RANK.tokens(x) is x
    assert ONE_RANK.least(7) == 7
