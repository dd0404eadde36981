"""A model in few bits answers like the model of the weights that its folder means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rota.core.adapter import Extra
from rota.core.config import FirstAdapters
from rota.core.ids import AdapterId
from rota.engine.families.table import read_spec
from rota.engine.parallel.shard import Shard
from rota.engine.quantised.maker import MatrixMaker
from rota.engine.quantised.matrices import FourBit, GroupsFile
from rota.engine.quantised.products import in_eight_bit_floats, rounded_rows
from rota.engine.weights.layouts.table import read_layout
from rota.engine.weights.load import Weights, dummy_weights, load_weights, weight_bytes
from rota.engine.weights.makers import EightBitFloats, FourBitCodes, FourBitGroups
from tests.builders import request
from tests.engine.agreement import choices
from tests.engine.lora.adapter_factory import load_with_peft, make_adapter
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.model.sequence import Sequences
from tests.engine.model_factory import make_tiny_model
from tests.engine.nearness import relative_error
from tests.engine.weights.writers import EIGHT, FOUR, IN_BLOCKS, LAYOUTS, REORDERED, write_model
from tests.worlds import outputs

CPU = torch.device("cpu")
PROMPT = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(5)).tolist()
NEW_TOKENS = 24


def maker_of(folder: Path, dtype: torch.dtype = torch.float32) -> MatrixMaker:
    """A GPU's, whose products have references on a CPU."""
    layout = read_layout(folder)
    if layout is None:
        return EightBitFloats()
    return EightBitFloats(layout.holds) if layout.bits == 8 else FourBitCodes(layout.holds, layout.group_size, dtype)


def rounds_inputs(model: PreTrainedModel) -> PreTrainedModel:
    """As products in eight-bit floats do; adapters, which run beside the matrices, get what was not rounded."""
    for name, module in model.named_modules():
        if name.endswith("proj"):
            module.register_forward_pre_hook(
                lambda _, inputs: (rounded_rows(inputs[0].flatten(0, -2)).weights().view_as(inputs[0]),)
            )
    return model


def with_matrices_rounded(model: PreTrainedModel) -> PreTrainedModel:
    state = model.state_dict()
    names = [name for name in state if name.endswith("proj.weight")]
    model.load_state_dict({name: in_eight_bit_floats(state[name]).weights() for name in names}, strict=False)
    return model


@torch.inference_mode()
def logits_of(model: PreTrainedModel) -> Tensor:
    logits: Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def logits_in(folder: Path, maker: MatrixMaker | None, dtype: torch.dtype = torch.float32) -> Tensor:
    sequences = Sequences(folder, dtype=dtype, maker=maker)
    found = [sequences.step(chunks={0: PROMPT[:30]})]
    return torch.cat(found + [sequences.step(decodes={0: token}) for token in PROMPT[30:]])


@pytest.mark.parametrize("layout", FOUR)
def test_four_bits_answer_like_their_weights(tmp_path, layout):
    expected = logits_of(write_model(tmp_path, layout))
    assert relative_error(logits_in(tmp_path, maker_of(tmp_path)), expected) < 1e-5


@pytest.mark.parametrize("layout", EIGHT)
def test_eight_bit_floats_answer_like_their_weights_by_rounded_activations(tmp_path, layout):
    model = write_model(tmp_path, layout)
    found = logits_in(tmp_path, maker_of(tmp_path))
    exact = logits_of(model)
    if layout in IN_BLOCKS:  # no product has their scales
        model = with_matrices_rounded(model)

    assert relative_error(found, logits_of(rounds_inputs(model))) < 1e-3
    assert relative_error(found, exact) > 0.005, "activations were not rounded"


def test_a_plain_folder_is_rounded_by_output_while_it_is_loaded(tmp_path):
    model = with_matrices_rounded(make_tiny_model(tmp_path, "qwen2"))
    assert relative_error(logits_in(tmp_path, EightBitFloats()), logits_of(rounds_inputs(model))) < 1e-3


@pytest.mark.parametrize("kind", ["dynamic", "weight-only"])
@pytest.mark.parametrize("layout", FOUR)
def test_a_cpu_s_products_take_stored_groups_and_leave_others_plain(tmp_path, layout, kind):
    expected = logits_of(write_model(tmp_path, layout))
    stored = read_layout(tmp_path)
    maker = FourBitGroups(stored.holds, FourBit(kind, GroupsFile(tmp_path)), torch.float32)
    found = relative_error(logits_in(tmp_path, maker), expected)

    assert found < (1e-5 if layout in REORDERED else 0.04)


def test_modules_that_were_not_converted_stay_plain(tmp_path):
    left_out = ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.k_proj")
    expected = logits_of(write_model(tmp_path, "4: AWQ", left_out=left_out))
    maker = maker_of(tmp_path)

    assert relative_error(logits_in(tmp_path, maker), expected) < 1e-5
    assert not maker.fits([f"{left_out[0]}.weight"], 64, 128)
    # Its neighbours are stored in four bits, and become plain with it.
    assert not maker.fits([f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"], 192, 64)
    assert maker.fits([f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"], 192, 64)


@pytest.mark.parametrize("layout", ["8: compressed-tensors, channels", "4: AWQ", "4: GPTQ, by importance"])
def test_a_mixed_batch_of_adapters_is_answered_as_peft_answers_it(tmp_path, layout):
    model = write_model(tmp_path / "model", layout, "llama2")
    make_adapter(tmp_path / "1", model, seed=1)
    make_adapter(tmp_path / "2", model, seed=2, r=8, use_dora=not layout.startswith("8"))
    if layout.startswith("8"):
        model = rounds_inputs(model)
    first = FirstAdapters(count=2, rank=8, pages=2, extras=Extra.GAIN_BIAS)
    server = Server(tmp_path / "model", slots=2, first=first, maker=maker_of(tmp_path / "model"))
    server.add(adapter(1, tmp_path), adapter(2, tmp_path))
    prompts = [PROMPT[:7], PROMPT]
    given = outputs(
        server.serve(
            [
                request(f"{place}-{number}", prompt=tuple(prompt), max_new_tokens=NEW_TOKENS, adapter=AdapterId(number))
                for place, prompt in enumerate(prompts)
                for number in range(3)
            ]
        )
    )

    for number in range(3):
        tuned = load_with_peft(tmp_path / str(number), model) if number else model
        answers = [given[f"{place}-{number}"] for place in range(len(prompts))]
        assert [len(answer) for answer in answers] == [NEW_TOKENS] * len(prompts)
        assert answers == choices(tuned, prompts, answers)


@pytest.mark.parametrize("layout", ["plain", *LAYOUTS])
def test_the_parts_of_two_ranks_make_the_whole(tmp_path, layout):
    """Of groups of 32 the cut of 64 inputs cuts none; one group of all it does."""
    make_tiny_model(tmp_path, "llama2", intermediate_size=128) if layout == "plain" else write_model(tmp_path, layout)
    spec, maker = read_spec(tmp_path), maker_of(tmp_path)

    def load(shard: Shard) -> Weights:
        return load_weights(tmp_path, spec, CPU, torch.float32, True, maker=maker, shard=shard)

    whole, *parts = (load(shard).layers[1] for shard in (Shard(), Shard(0, 2), Shard(1, 2)))
    x = torch.randn(3, 128)
    inner = whole.gate_up(x[:, :64]).unflatten(1, (2, 2, -1))  # gate and up, of each rank
    for rank, part in enumerate(parts):
        torch.testing.assert_close(part.gate_up(x[:, :64]).unflatten(1, (2, -1)), inner[:, :, rank])
    summed = sum(part.down(x[:, 64 * rank :][:, :64]) for rank, part in enumerate(parts))
    # Each rank rounds its own part of x, and a plain folder's matrices by the part of each output that it has.
    bound = 1e-5 if layout.startswith("4") else 0.06
    assert relative_error(summed, whole.down(x)) < bound


@pytest.mark.parametrize("layout", ["8: AutoFP8", "4: AWQ", "4: compressed-tensors, channels"])
def test_bytes_are_known_before_they_are_read(tmp_path, layout):
    write_model(tmp_path, layout)
    spec, maker = read_spec(tmp_path), maker_of(tmp_path)
    for shard in (Shard(), Shard(1, 2)):
        read = load_weights(tmp_path, spec, CPU, torch.float32, True, maker=maker, shard=shard).size_bytes
        assert read == weight_bytes(spec, torch.float32, shard, maker)
        assert read < 0.7 * weight_bytes(spec, torch.float32, shard)


@pytest.mark.parametrize("layout", ["8: AutoFP8", "4: AWQ"])
def test_random_weights_are_rounded_as_a_folder_s_are_stored(tmp_path, layout):
    """Their answers cannot be right, but they take the same kernels and the same memory."""
    write_model(tmp_path, layout)
    spec, maker = read_spec(tmp_path), maker_of(tmp_path)
    drawn = dummy_weights(spec, CPU, torch.float32, maker=maker)
    plain = dummy_weights(spec, CPU, torch.float32)
    x = torch.randn(3, 64)

    assert drawn.size_bytes == weight_bytes(spec, torch.float32, maker=maker)
    assert 0.001 < relative_error(drawn.layers[0].qkv(x), plain.layers[0].qkv(x)) < 0.15
