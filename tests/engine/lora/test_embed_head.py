"""The ends of the model, by torch and by the kernels: each token gets its own adapter's part, and bytes are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rota.core.adapter import Extra
from rota.core.errors import AdapterError
from rota.engine.lora.bank import Bank
from rota.engine.lora.base import BaseEmbedHead
from rota.engine.lora.embed_head import EmbedHead, EmbedHeadBank
from rota.engine.lora.host import EmbedHeadFactors
from rota.engine.lora.reference import add_with_gain_bias
from rota.engine.model.linear import Linear
from tests.engine.lora.site_numbers import BOUNDS, batch_of
from tests.engine.lora.small_bank import CPU, MAX_RANK, SMALL, host_adapter
from tests.engine.nearness import relative_error
from tests.engine.triton_interpreter import DEVICE, load

triton_ends = load("rota.engine.lora.triton_embed_head")
BOTH = Extra.EMBEDDING | Extra.HEAD
SLOTS = 3
NAMES = {Extra.EMBEDDING: "embedding", Extra.HEAD: "head"}
TOKENS = [2, 0, 3, 2, 1, 3, 0]
PLAIN = host_adapter((1, 1, 1, 1), 1.0)


def below(extras: Extra) -> BaseEmbedHead:
    embedding = torch.zeros(SMALL.vocab_size, SMALL.hidden_size)
    return BaseEmbedHead(extras, embedding, Linear(embedding))


def by_torch(bank: EmbedHeadBank) -> EmbedHead:
    return EmbedHead(bank, add_with_gain_bias)


@pytest.fixture(params=["torch", "triton"])
def made(request) -> tuple[EmbedHeadBank, EmbedHead, str]:
    """A bank with ends in slots 0 and 2; 1 has none, and 3 is the base model's."""
    torch.manual_seed(0)
    make, device = (by_torch, "cpu") if request.param == "torch" else (triton_ends.TritonEmbedHead, DEVICE)
    bank = EmbedHeadBank(SMALL, SMALL.vocab_size, SLOTS, MAX_RANK, torch.float32, torch.device(device), below(BOTH))
    for slot, rank in ((0, 5), (2, MAX_RANK)):
        # A former resident has left larger factors.
        bank.copy_in(slot, replace(PLAIN, embedding=embedding(MAX_RANK), head=head(MAX_RANK)))
        bank.copy_in(slot, replace(PLAIN, embedding=embedding(rank), head=head(rank)))
    bank.copy_in(1, replace(PLAIN, embedding=embedding(2), head=head(2)))
    bank.copy_in(1, PLAIN)
    return bank, make(bank), device


def embedding(rank: int) -> EmbedHeadFactors:
    return EmbedHeadFactors(torch.randn(SMALL.vocab_size, rank), torch.randn(rank, SMALL.hidden_size))


def head(rank: int) -> EmbedHeadFactors:
    return EmbedHeadFactors(torch.randn(rank, SMALL.hidden_size), torch.randn(rank, SMALL.vocab_size))


def test_each_token_gets_its_own_adapter_s_row(made):
    bank, ends, device = made
    ids = torch.tensor([5, 31, 0, 7, 5, 9, 31], device=device)
    x = torch.randn(len(TOKENS), SMALL.hidden_size, device=device)
    expected = x.double().cpu()
    for token, slot in enumerate(TOKENS):
        if slot < SLOTS:
            rank = int(bank.embedding.ranks[slot])
            a, b = bank.embedding.a[slot, ids[token], :rank], bank.embedding.b[slot, :rank]
            expected[token] += a.double().cpu() @ b.double().cpu()
    before = x.clone()

    ends.embed(x, ids, batch_of(TOKENS, SLOTS, 16, device))

    assert relative_error(x, expected) < BOUNDS[torch.float32]
    others = [token for token, slot in enumerate(TOKENS) if slot in (1, 3)]
    assert torch.equal(x[others], before[others])


def test_each_row_that_samples_gets_its_own_adapter_s_logits(made):
    bank, ends, device = made
    hidden = torch.randn(len(TOKENS), SMALL.hidden_size, device=device)
    logits = torch.randn(len(TOKENS), SMALL.vocab_size, device=device)
    expected = logits.double().cpu()
    for token, slot in enumerate(TOKENS):
        if slot < SLOTS:
            a, b = bank.head.of_slot(slot, int(bank.head.ranks[slot]))
            expected[token] += a.double().cpu() @ hidden[token].double().cpu() @ b.double().cpu()

    ends.head(logits, hidden, batch_of(TOKENS, SLOTS, 16, device))

    assert relative_error(logits, expected) < BOUNDS[torch.float32]
    ends.head(logits[:0], hidden[:0], batch_of([], SLOTS, 16, device))  # a chunk that does not sample


@pytest.mark.parametrize("way", ["torch", "triton"])
def test_ends_are_trimmed_where_an_adapter_has_trims_there(way):
    torch.manual_seed(0)
    make, device = (by_torch, "cpu") if way == "torch" else (triton_ends.TritonEmbedHead, DEVICE)
    base = below(BOTH | Extra.GAIN_BIAS)
    bank = EmbedHeadBank(SMALL, SMALL.vocab_size, SLOTS, MAX_RANK, torch.float32, torch.device(device), base)
    looked_up = replace(embedding(3), gain_bias=torch.randn(2, SMALL.hidden_size))
    scored = replace(head(3), gain_bias=torch.randn(2, SMALL.vocab_size))
    for slot in (0, 2):
        bank.copy_in(slot, replace(PLAIN, embedding=looked_up, head=scored))
    bank.copy_in(0, replace(PLAIN, embedding=embedding(2), head=head(2)))  # a plain one takes the place of a DoRA
    ids = torch.tensor([5, 31, 0, 7, 5, 9, 31], device=device)
    x, logits = torch.randn(7, SMALL.hidden_size, device=device), torch.randn(7, SMALL.vocab_size, device=device)
    plain_x, plain_logits = x.clone(), logits.clone()
    batch, without = batch_of(TOKENS, SLOTS, 16, device), EmbedHeadBank.__new__(EmbedHeadBank)
    without.own, without.embedding, without.head = (
        None,
        replace(bank.embedding, gain_bias=None),
        replace(bank.head, gain_bias=None),
    )
    make(without).embed(plain_x, ids, batch)
    make(without).head(plain_logits, x, batch)

    make(bank).head(logits, x, batch)
    make(bank).embed(x, ids, batch)

    for found, plain, (gain, shift) in ((x, plain_x, looked_up.gain_bias), (logits, plain_logits, scored.gain_bias)):
        expected = plain.cpu().clone()
        expected[[0, 3]] = expected[[0, 3]] * gain + shift
        torch.testing.assert_close(found.cpu(), expected)
        others = [1, 2, 4, 5, 6]
        assert torch.equal(found.cpu()[others], plain.cpu()[others])
    gain_bias = SLOTS * 2 * (SMALL.vocab_size + SMALL.hidden_size) * 4
    assert (
        bank.size_bytes
        == EmbedHeadBank(SMALL, 32, SLOTS, MAX_RANK, torch.float32, CPU, below(BOTH)).size_bytes + gain_bias
    )


def own(tokens: int = SMALL.vocab_size) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(tokens * SMALL.hidden_size).split(50))


@pytest.fixture(params=["torch", "triton"])
def with_matrices(request) -> tuple[EmbedHeadBank, EmbedHead, str]:
    """Slot 0 has both, slot 2 a head; a former resident has left another embedding there."""
    torch.manual_seed(0)
    make, device = (by_torch, "cpu") if request.param == "torch" else (triton_ends.TritonEmbedHead, DEVICE)
    base = BaseEmbedHead(
        Extra.NONE, torch.zeros(SMALL.vocab_size, SMALL.hidden_size), Linear(torch.zeros(1, 1)), matrices=3
    )
    bank = EmbedHeadBank(SMALL, SMALL.vocab_size, SLOTS, MAX_RANK, torch.float32, torch.device(device), base)
    bank.copy_in(2, replace(PLAIN, own_embedding=own()), [1])
    bank.copy_in(1, replace(PLAIN, own_embedding=own(), own_head=own()), [1, 0])
    bank.copy_in(0, replace(PLAIN, own_embedding=own(), own_head=own()), [2, 0])
    bank.copy_in(2, replace(PLAIN, own_head=own()), [1])
    bank.copy_in(1, None)
    return bank, make(bank), device


def test_a_matrix_of_an_adapter_s_own_takes_the_place_of_the_model_s(with_matrices):
    bank, ends, device = with_matrices
    ids = torch.tensor([5, 31, 0, 7, 5, 9, 31], device=device)
    x = torch.randn(len(TOKENS), SMALL.hidden_size, device=device)
    logits = torch.randn(len(TOKENS), SMALL.vocab_size, device=device)
    embedded, scored = x.clone(), logits.double().cpu()
    embedded[[1, 6]] = bank.own.numbers[2][ids[[1, 6]]]
    for token, place in ((0, 1), (3, 1), (1, 0), (6, 0)):
        scored[token] = bank.own.numbers[place].double().cpu() @ x[token].double().cpu()

    batch = batch_of(TOKENS, SLOTS, 16, device)
    ends.head(logits, x, batch)
    ends.embed(x, ids, batch)

    assert torch.equal(x, embedded)
    assert relative_error(logits, scored) < BOUNDS[torch.float32]


def test_a_rank_has_the_head_of_its_own_tokens():
    base = BaseEmbedHead(
        Extra.NONE, torch.zeros(SMALL.vocab_size, SMALL.hidden_size), Linear(torch.zeros(1, 1)), matrices=1
    )
    bank = EmbedHeadBank(SMALL, 20, SLOTS, MAX_RANK, torch.float32, CPU, base)
    adapter = replace(PLAIN, own_head=own(20))
    bank.copy_in(0, adapter, [0])
    logits, x = torch.zeros(1, 20), torch.randn(1, SMALL.hidden_size)
    by_torch(bank).head(logits, x, batch_of([0], SLOTS, 16, "cpu"))
    torch.testing.assert_close(logits[0], torch.cat(adapter.own_head).view(20, -1) @ x[0])
    assert adapter.size_bytes == PLAIN.size_bytes + 20 * SMALL.hidden_size * 4
    assert bank.size_bytes == SMALL.vocab_size * SMALL.hidden_size * 4


def test_a_bank_has_the_ends_that_were_asked_for_and_counts_their_bytes():
    plain = Bank(SMALL, 2, MAX_RANK, torch.float32, CPU).size_bytes
    for extras, numbers in ((Extra.EMBEDDING, 32 + 8), (Extra.HEAD, 16 + 8), (BOTH, 32 + 8 + 16 + 8)):
        ends = EmbedHeadBank(
            SMALL, 16, 2, MAX_RANK, torch.float32, CPU, below(extras)
        )  # of two ranks, this one has 16 tokens
        bank = Bank(SMALL, 2, MAX_RANK, torch.float32, CPU, embed_head=ends)
        assert bank.size_bytes == plain + 2 * MAX_RANK * numbers * 4
        assert (ends.embedding is None, ends.head is None) == (Extra.EMBEDDING not in extras, Extra.HEAD not in extras)
        both = {Extra.EMBEDDING: embedding(2), Extra.HEAD: EmbedHeadFactors(torch.ones(2, 8), torch.ones(2, 16))}
        there = {name: both[end] for end, name in NAMES.items() if end in extras}
        bank.copy_in(1, replace(PLAIN, **there))
        if extras != BOTH:
            with pytest.raises(AdapterError, match="among its --lora-paths"):
                bank.copy_in(1, replace(PLAIN, **{name: both[end] for end, name in NAMES.items()}))
        bank.clear(1)
        assert all(not end.ranks.any() for end in (ends.embedding, ends.head) if end is not None)
    adapter = replace(PLAIN, head=head(3))
    assert adapter.size_bytes == PLAIN.size_bytes + 3 * (32 + 8) * 4


def test_rows_of_a_head_are_told_in_any_form():
    torch.manual_seed(0)
    plain = Linear(torch.randn(32, 8))

    class Hidden:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return plain(x)

    for form in (plain, Hidden()):
        head = BaseEmbedHead(BOTH, torch.zeros(32, 8), form).head
        torch.testing.assert_close(head.rows([3, 31]), plain.weight[[3, 31]])
        squares, products = head.squares, head.products(a := torch.randn(3, 8))
        torch.testing.assert_close(squares, plain.weight.square().sum(1))
        torch.testing.assert_close(products, a @ plain.weight.T)


def test_columns_of_an_embedding_are_told():
    table, a = torch.randn(32, 8), torch.randn(32, 3)
    squares, products = BaseEmbedHead(BOTH, table, Linear(table)).embedding_against(a)
    torch.testing.assert_close(squares, table.square().sum(0))
    torch.testing.assert_close(products, a.T @ table)
