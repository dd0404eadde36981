"""Prompts of a given length are made from a seed, so that every server gets the same ones."""

from __future__ import annotations

import random
from array import array

# With a space before it, each word is a single token in the vocabularies of GPT (50k, 100k, 200k), Mistral (32k and
# 131k) and SmolLM2. So a text of N words has N tokens, and one more where a tokenizer puts its own at the beginning.
_WORDS = """
the of and to in is that it for was on are as with his they at be this from have or by one had not but what all
were when we there can an your which their if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made
over did down only way find use may water long little very after words called just where most know get through
back much before go good new write our used me man too any day same right look think also around another came
come work three word must because does part even place well such here take why things help put years different
away again off went old number great tell men say small every found still between name should home big give air
line set own under read last never us left end along while might next sound below saw something thought both
few those always looked show large often together asked house world going want school important until form
food keep children feet land side without boy once animals life enough took sometimes four head above kind
began almost live page got earth need far hand high year mother light parts country father let night following
picture being study second eyes soon times story boys since white days ever paper hard near sentence better
best across during today others however sure means knew try told young miles sun ways thing whole hear example
heard several change answer room sea against top turned learn point city play toward five using himself usually
"""

WORDS = tuple(_WORDS.split())
FIRST = "the"  # a single token also without a space before it, unlike some of the words


def random_text(dice: random.Random, words: int) -> str:
    return " ".join([FIRST, *dice.choices(WORDS, k=words - 1)])


def random_ids(dice: random.Random, tokens: int, vocab_size: int) -> array[int]:
    """Random token ids, without the lowest tenth of the vocabulary: it holds the control tokens."""
    return array("I", dice.choices(range(vocab_size // 10, vocab_size), k=tokens))
