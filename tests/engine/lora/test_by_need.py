"""With default flags an engine has slots for the adapters that it starts with, and answers as PEFT does."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from rota import LLM, SamplingParams
from rota.core.config import CacheConfig, EngineConfig, FirstAdapters, LoraConfig
from rota.core.errors import AdapterError
from rota.engine.build import build_engine
from rota.engine.choices import choose, choose_bank
from rota.engine.device import DeviceMemory
from rota.engine.families.table import read_spec
from rota.engine.kv_cache import CacheShape
from rota.engine.lora.bank import slot_bytes
from rota.engine.lora.bank_size import BankSize
from rota.engine.lora.files.checkpoint import read_checkpoint
from rota.engine.model.sites import SITES
from rota.engine.parallel.group import ONE_RANK, RankGroup
from rota.llm.config import build_device, engine_config, first_adapters, locate_model, told_later, with_first
from rota.start import START
from tests.engine.lora.adapter_factory import load_with_peft, make_adapter
from tests.engine.lora.small_bank import LLAMA_8B
from tests.engine.model_factory import make_tiny_model
from tests.engine.parallel.together import together
from tests.tiny_tokenizer import write_byte_tokenizer

PROMPTS = [[5, 9, 77, 130, 4], list(range(20, 60))]
NEW_TOKENS = 16
OPTIONS = {"device": "cpu", "dtype": "float32", "kv_blocks": 128, "max_running_requests": 16}
RANKS = {"four": 4, "eight": 8, "twenty": 20, "many": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("need") / "model")
    model = make_tiny_model(folder, "smollm2")
    model.name_or_path = str(folder)
    return model


@pytest.fixture(scope="module")
def adapters(model: PreTrainedModel) -> dict[str, Path]:
    """One of each rank, by name."""
    folder = Path(model.name_or_path).parent
    return {name: make_adapter(folder / name, model, seed=rank, r=rank) for name, rank in RANKS.items()}


def config(model: PreTrainedModel, paths: list[Path], **options: object) -> EngineConfig:
    asked = {"model_path": model.name_or_path, "lora_paths": [str(path) for path in paths], **OPTIONS, **options}
    located = locate_model(engine_config(asked, quiet=True))
    return with_first(located, first_adapters(located))


def answer(model: PreTrainedModel | PeftModel, prompt: list[int]) -> list[int]:
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    mask = torch.ones_like(tokens)
    made = model.generate(
        input_ids=tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("names", [tuple(RANKS), ("four", "eight")])
def test_adapters_of_every_rank_answer_in_one_batch_as_under_peft(model, adapters, names):
    paths = {name: adapters[name] for name in names}
    tuned = {None: model, **{name: load_with_peft(path, model) for name, path in paths.items()}}
    asked = [(prompt, name) for prompt in PROMPTS for name in tuned]
    llm = LLM(model.name_or_path, adapters=paths, quiet=True, **OPTIONS)

    answers = llm.generate(
        [prompt for prompt, _ in asked],
        SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True),
        adapter=[name for _, name in asked],
    )

    assert [list(one.token_ids) for one in answers] == [answer(tuned[name], prompt) for prompt, name in asked]


def test_an_adapter_that_comes_later_may_be_as_large_as_the_largest_at_the_start(model, adapters):
    llm = LLM(model.name_or_path, adapters={"eight": adapters["eight"]}, quiet=True, **OPTIONS)
    llm.load_adapter("four", adapters["four"])
    sentence = "over the limit of 8 that slots were made for; start the server with --max-lora-rank 64, or with this"
    with pytest.raises(AdapterError, match=sentence):
        llm.load_adapter("many", adapters["many"])


@pytest.mark.parametrize(
    ("names", "options", "found"),
    [
        (("four", "eight"), {}, (8, 8, 0)),  # one page each: slots of one rank
        (("four", "twenty"), {}, (8, 24, 11)),
        (tuple(RANKS), {}, (8, 64, 21)),
        (tuple(RANKS), {"max_loras_per_batch": 3}, (3, 64, 0)),
        (("four",), {"max_lora_rank": 5, "max_loras_per_batch": 2}, (2, 5, 0)),
        (("four", "twenty"), {"max_lora_rank": 64}, (8, 64, 0)),
    ],
)
def test_an_engine_has_the_slots_that_its_first_adapters_need(model, adapters, names, options, found):
    capacity = build_engine(config(model, [adapters[name] for name in names], **options)).capacity
    assert (capacity.slots, capacity.slot_rank, capacity.pages) == found
    place = slot_bytes(read_spec(Path(model.name_or_path)), 8 if capacity.pages else capacity.slot_rank, torch.float32)
    assert capacity.adapter_bytes == (capacity.pages or capacity.slots) * place
    assert capacity.fused_lora_a == ()  # there are none on a CPU


def test_an_engine_whose_server_still_looks_at_its_adapters_waits_for_what_they_need(model, monkeypatch):
    found = FirstAdapters(count=2, rank=20, pages=4)
    monkeypatch.setattr(START, "wait_for_first", lambda: found)
    capacity = build_device(told_later(config(model, []))).capacity
    assert (capacity.slots, capacity.slot_rank, capacity.pages) == (8, 24, 11)


def test_on_a_gpu_six_adapters_of_rank_16_lie_where_flags_set_by_hand_would_put_them(model):
    asked = replace(
        config(model, []), cache=CacheConfig(mem_fraction_static=0.88), first=FirstAdapters(count=6, rank=16, pages=12)
    )
    memory = DeviceMemory(140 << 30, 16 << 30)
    gpu = replace(choose(asked), spec=LLAMA_8B, dtype=torch.bfloat16, lora_backend="triton", memory=memory)
    shape = CacheShape(LLAMA_8B.layers, LLAMA_8B.kv_heads, LLAMA_8B.head_dim, 16, torch.bfloat16)

    def found(lora: LoraConfig) -> tuple[int, int, tuple[str, ...]]:
        chosen = gpu.with_bank(choose_bank(replace(asked, lora=lora), gpu, shape, ONE_RANK))
        return chosen.bank.slots, chosen.bank.rank, chosen.fused_lora_a

    assert found(LoraConfig()) == found(LoraConfig(max_loras_per_batch=8, max_lora_rank=16)) == (8, 16, SITES)


def test_in_host_memory_an_adapter_takes_the_bytes_of_its_own_rank(model, adapters):
    spec = read_spec(Path(model.name_or_path))
    copy = read_checkpoint(adapters["eight"], spec, torch.float32, max_rank=64)
    assert copy.size_bytes == slot_bytes(spec, 8, torch.float32)


def test_a_restart_changes_no_slot_though_an_adapter_is_gone(model, adapters, tmp_path):
    first = shutil.copytree(adapters["twenty"], tmp_path / "gone")
    asked = config(model, [first, adapters["four"]])
    before = build_engine(asked).capacity
    shutil.rmtree(first)
    after = build_engine(asked).capacity
    assert replace(after, decode_s=before.decode_s, token_s=before.token_s) == before, "all but its speed"
    assert (before.slots, before.slot_rank, before.pages) == (8, 24, 11)


def test_ranks_agree_on_what_the_first_starts_with_and_the_poorest_holds(model):
    asked = config(model, [])
    chosen = choose(asked)
    shape = CacheShape(1, 1, 1, 8, torch.float32)
    slot = slot_bytes(chosen.spec, 16, torch.float32)

    def agreed(group: RankGroup, told: tuple[FirstAdapters, ...], slots: tuple[int, ...]) -> BankSize:
        memory = DeviceMemory(20 * slots[group.rank] * slot, 0)
        own = replace(asked, first=told[group.rank], cache=replace(asked.cache, kv_blocks=None))
        return choose_bank(own, replace(chosen, memory=memory), shape, group)

    # The second rank was started by torchrun without --lora-paths, and would take 64.
    told = (FirstAdapters(count=40, rank=16, pages=80), FirstAdapters())
    one, other = together(2, lambda group: agreed(group, told, (30, 20)))
    assert [(each.slots, each.rank) for each in (one, other)] == [(20, 16)] * 2
    assert one.slots_from == "the memory of another rank"
    assert other.slots_from == "0.05 of the memory"

    # Of different ranks: 20 slots of rank 16 take the bytes of 40 pages.
    mixed = (FirstAdapters(count=40, rank=16, pages=79), FirstAdapters(count=1, rank=8, pages=1))
    one, other = together(2, lambda group: agreed(group, mixed, (30, 20)))
    assert [(each.slots, each.rank, each.pages) for each in (one, other)] == [(40, 16, 40)] * 2
    assert one.slots_from == "the memory of another rank"
