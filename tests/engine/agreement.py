"""How far a GPU's answers may be from a reference: as far as the reference itself moves when it computes as coarsely.

A twin is the reference in the GPU's precision: in bfloat16, or with rounded activations. Two measures are taken of
every answer. On average the GPU's log-probabilities are as near to the reference as the twin's: a fault that touches
many tokens shows there, however small it is. And no token is less likely than the likeliest by more than the twin's
largest error can explain: a fault at a single place shows there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rota.core.events import Event, Produced, PromptsScored
from rota.core.ids import RequestId
from rota.engine.quantised.products import in_eight_bit_floats, rounded_rows

# Of the spread of a position's logits: bfloat16 keeps 8 bits, and layers add up.
CLEAR_MARGIN = 0.12
# Both errors are means over some hundred tokens. On an H200 their ratio was between 0.8 and 1.1.
MOST_ABOVE_TWIN = 1.25


@dataclass
class Agreement:
    """Errors of all answers so far, in log-probability: the GPU's and the twin's."""

    ours: list[Tensor] = field(default_factory=list)
    twin: list[Tensor] = field(default_factory=list)

    def take(self, answer: Sequence[int], told: Sequence[float], right: Tensor, twin: Tensor, what: str) -> None:
        """One answer; `right` and `twin` are the logits [tokens, vocabulary] of both for the same tokens."""
        chosen = torch.tensor(answer)[:, None]
        sure, likely = (logits.log_softmax(1).gather(1, chosen)[:, 0] for logits in (right, twin))
        self.ours.append((torch.tensor(told) - sure).abs())
        self.twin.append((likely - sure).abs())
        spread = right.std(dim=1)
        # Logits that are off by e at most choose a token that is behind by 2 e at most.
        allowed = max(CLEAR_MARGIN, 2 * float(((twin - right).abs().amax(1) / spread).max()))
        behind = float(((right.amax(1) - right.gather(1, chosen)[:, 0]) / spread).max())
        assert behind <= allowed, what

    def check(self) -> None:
        ours, twin = (float(torch.cat(errors).mean()) for errors in (self.ours, self.twin))
        assert ours <= MOST_ABOVE_TWIN * twin, f"{ours:.4f} beside {twin:.4f}"


def logits_of(model: torch.nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """[answer, vocabulary]: what a model says of an answer's tokens, wherever the model lies."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([[*prompt, *answer]], device=device)).logits
    return logits[0, len(prompt) - 1 : -1].float().cpu()


def choices(
    model: torch.nn.Module, prompts: Iterable[Sequence[int]], answers: Iterable[Sequence[int]]
) -> list[list[int]]:
    """What a model would say greedily at every place of some answers, had it said before what they say.

    Where that is what they say, it says the same by itself, token by token; and it is asked only once an answer.
    """
    return [
        logits_of(model, prompt, answer).argmax(1).tolist() for prompt, answer in zip(prompts, answers, strict=True)
    ]


def agrees(model: torch.nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether each token is the reference's, or one that it holds nearly as likely."""
    logits = logits_of(model, prompt, answer)
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool(((logits.amax(1) - chosen) / logits.std(dim=1) <= CLEAR_MARGIN).all())


def in_eight_bits(model: torch.nn.Module, rounds_matrices: bool) -> torch.nn.Module:
    """A twin whose layers' products round x as products in eight-bit floats do, and maybe their matrices."""
    twin = copy.deepcopy(model)
    for name, module in twin.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(("proj", "proj.base_layer")):
            module.register_forward_pre_hook(_round)
            if rounds_matrices:
                module.weight.data = in_eight_bit_floats(module.weight.data).weights()
    return twin


def _round(_: torch.nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor]:
    (x,) = given
    rounded = rounded_rows(x.flatten(0, -2))
    return ((rounded.codes.float() * rounded.scales[:, None]).view(x.shape).to(x.dtype),)


def in_bfloat16(model: torch.nn.Module) -> torch.nn.Module:
    """A twin on the GPU: a processor may take minutes for what it has no instructions for."""
    return copy.deepcopy(model).to("cuda", torch.bfloat16)


def told_logprobs(events: Iterable[Event]) -> dict[RequestId, list[float]]:
    """Of the tokens of each answer that was asked for with logprobs."""
    told: dict[RequestId, list[float]] = {}
    for event in events:
        if isinstance(event, Produced):
            for place, entry in event.logprobs:
                told.setdefault(event.request_ids[place], []).append(entry.chosen)
    return told


def told_scores(events: Iterable[Event]) -> dict[RequestId, list[float]]:
    """Of the tokens of each prompt that was asked for with prompt_logprobs, but its first."""
    told: dict[RequestId, list[float]] = {}
    for event in events:
        if isinstance(event, PromptsScored):
            for id, scores in zip(event.request_ids, event.scores, strict=True):
                told.setdefault(id, []).extend(entry.chosen for entry in scores)
    return told
