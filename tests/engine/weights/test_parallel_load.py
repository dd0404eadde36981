"""A model that is read in parallel has the weights of the memory map, bit for bit, or the same refusal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.families.table import read_spec
from rota.engine.folders.gguf_folder import GgufTensor, write_safetensors
from rota.engine.lora.layout import fused_rows
from rota.engine.model.linear import Linear
from rota.engine.model.sites import SITES, site_shapes
from rota.engine.parallel.shard import WHOLE, Shard
from rota.engine.quantised.maker import MatrixMaker
from rota.engine.weights.layouts.table import read_layout
from rota.engine.weights.load import NO_FUSED_ROWS, FusedRows, Weights, load_weights
from rota.engine.weights.makers import EightBitFloats, FourBitCodes
from rota.engine.weights.read_ahead import RingSetup, no_copier
from tests.engine.model_factory import make_tiny_model
from tests.engine.weights.copiers import PlainCopier
from tests.engine.weights.writers import write_model

CPU = torch.device("cpu")
SINGLE = "model.safetensors"
# Smaller than a matrix, and larger than a norm.
SMALL = RingSetup(threads=3, buffers=4, buffer_bytes=4096)


def load(
    folder: Path,
    copier: PlainCopier | None = None,
    dtype: torch.dtype = torch.float32,
    fused: FusedRows = NO_FUSED_ROWS,
    maker: MatrixMaker | None = None,
    shard: Shard = WHOLE,
) -> Weights:
    copier_for = no_copier if copier is None else lambda _: copier
    return load_weights(folder, read_spec(folder), CPU, dtype, True, fused, maker, shard, copier_for, SMALL)


def numbers(weights: Weights, widths: list[int]) -> Iterator[Tensor]:
    """Products by one give the numbers of a projection in few bits."""
    dtype = weights.norm.dtype
    yield from (weights.embedding, weights.norm, weights.head(torch.eye(weights.embedding.shape[1], dtype=dtype)))
    for layer in weights.layers:
        yield from layer.norms.values()
        for site, width in zip((layer.qkv, layer.output, layer.gate_up, layer.down), widths, strict=True):
            yield site.weight if isinstance(site, Linear) else site(torch.eye(width, dtype=dtype))
            yield site(torch.zeros(1, width, dtype=dtype))  # its bias
    yield from weights.fused_lora_a.values()


def assert_equal(folder: Path, found: Weights, expected: Weights, shard: Shard = WHOLE) -> None:
    widths = [site.inputs for site in site_shapes(shard.local(read_spec(folder)))]
    pairs = list(zip(numbers(found, widths), numbers(expected, widths), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)
    assert found.size_bytes == expected.size_bytes


def plain_bytes(folder: Path, is_plain: Callable[[str], bool] = lambda name: not name.endswith(".bias")) -> int:
    """Of the tensors that are read in parallel."""
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return sum(tensor.nbytes for file in files for name, tensor in file.items() if is_plain(name))


def change_tensors(folder: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    for path in folder.glob("*.safetensors"):
        save_file({name: change(name, tensor) for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("family", ["llama2", "llama3", "qwen2", "smollm2", "gemma3"])
def test_every_tensor_is_the_one_of_the_memory_map(tmp_path, family):
    """One file and several, biases and none, a head of its own and a tied one."""
    make_tiny_model(tmp_path, family)
    copier = PlainCopier()
    assert_equal(tmp_path, load(tmp_path, copier), load(tmp_path))
    assert copier.copied_bytes == plain_bytes(tmp_path)
    assert copier.buffers == 0


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("served", [torch.bfloat16, torch.float32])
def test_a_tensor_is_converted_behind_its_copy(tmp_path, stored, served):
    make_tiny_model(tmp_path, "llama3")
    change_tensors(tmp_path, lambda name, tensor: tensor if "norm" in name else tensor.to(stored))
    copier = PlainCopier()
    assert_equal(tmp_path, load(tmp_path, copier, served), load(tmp_path, dtype=served))
    assert copier.copied_bytes == plain_bytes(tmp_path)


def test_a_tensor_may_begin_at_any_byte(tmp_path):
    make_tiny_model(tmp_path, "llama2")
    expected = load(tmp_path)
    spare = torch.arange(3, dtype=torch.uint8)  # a name that is passed over, and then all others lie askew
    stored = {name: tensor.clone() for name, tensor in load_file(tmp_path / SINGLE).items()}
    tensors = {"model.rotary_emb.inv_freq": spare, **stored}
    kinds = {torch.uint8: "U8", torch.float32: "F32"}
    entries = [GgufTensor(name, tuple(one.shape), kinds[one.dtype], one.itemsize) for name, one in tensors.items()]
    write_safetensors(tmp_path / SINGLE, entries, (one.numpy() for one in tensors.values()))
    assert_equal(tmp_path, load(tmp_path, PlainCopier()), expected)


def test_rows_of_a_matrix_may_have_the_adapters_rows_below(tmp_path):
    make_tiny_model(tmp_path, "qwen2")
    fused = fused_rows(read_spec(tmp_path), SITES, 2, 8)
    found = load(tmp_path, PlainCopier(), fused=fused)
    assert_equal(tmp_path, found, load(tmp_path, fused=fused))
    assert len(found.fused_lora_a) > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_rows_in_parallel_and_its_columns_from_the_map(tmp_path, rank):
    make_tiny_model(tmp_path, "llama2")
    copier, shard = PlainCopier(), Shard(rank, 2)
    assert_equal(tmp_path, load(tmp_path, copier, shard=shard), load(tmp_path, shard=shard), shard)
    by_rows = plain_bytes(tmp_path, lambda name: name.endswith(("head.weight", "_proj.weight")))
    by_rows -= plain_bytes(tmp_path, lambda name: name.endswith(("o_proj.weight", "down_proj.weight")))
    whole = plain_bytes(tmp_path, lambda name: name.endswith(("tokens.weight", "norm.weight")))
    assert copier.copied_bytes == whole + by_rows // 2


@pytest.mark.parametrize("layout", ["8: AutoFP8", "8: compressed-tensors, channels", "4: AWQ", "4: GPTQ"])
@pytest.mark.parametrize("has_maker", [True, False])
def test_a_folder_in_few_bits_reads_what_is_plain_in_parallel(tmp_path, layout, has_maker):
    left_out = "model.layers.0.self_attn.k_proj"  # so its site stays plain, in parts of two kinds
    write_model(tmp_path, layout, "qwen2", left_out=(left_out,))
    copier, maker = PlainCopier(), maker_of(tmp_path) if has_maker else None
    assert_equal(tmp_path, load(tmp_path, copier, maker=maker), load(tmp_path, maker=maker))
    plain = (f"{left_out}.weight", "tokens.weight", "norm.weight", "head.weight")
    assert copier.copied_bytes == plain_bytes(tmp_path, lambda name: name.endswith(plain))


def test_plain_weights_are_rounded_as_they_come(tmp_path):
    """A maker needs all of a matrix at once, while others are still to be read."""
    make_tiny_model(tmp_path, "qwen2", intermediate_size=128)
    copier = PlainCopier()
    assert_equal(tmp_path, load(tmp_path, copier, maker=EightBitFloats()), load(tmp_path, maker=EightBitFloats()))
    assert copier.copied_bytes == plain_bytes(tmp_path)


def maker_of(folder: Path) -> MatrixMaker:
    layout = read_layout(folder)
    assert layout is not None
    if layout.bits == 8:
        return EightBitFloats(layout.holds)
    return FourBitCodes(layout.holds, layout.group_size, torch.float32)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, name):
    make_tiny_model(tmp_path, "llama2")

    def spoil(tensor_name: str, tensor: Tensor) -> Tensor:
        tensor.view(-1)[-1] = torch.inf if tensor_name == name else tensor.view(-1)[-1]
        return tensor

    change_tensors(tmp_path, spoil)
    copier = PlainCopier()
    with pytest.raises(ModelError, match=f"the tensor '{name}' has values that are NaN or infinite"):
        load(tmp_path, copier)
    assert copier.buffers == 0


class CuttingCopier(PlainCopier):
    """Someone replaces the file as soon as it is read."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def buffer(self, size: int) -> Tensor:
        os.truncate(self._path, 5000)
        return super().buffer(size)


def test_a_file_that_is_cut_while_it_is_read_ends_the_load_with_a_sentence(tmp_path):
    make_tiny_model(tmp_path, "llama2")
    with pytest.raises(ModelError, match=f"{SINGLE} is truncated: while it was read, it ended in the middle of"):
        load(tmp_path, CuttingCopier(tmp_path / SINGLE))
