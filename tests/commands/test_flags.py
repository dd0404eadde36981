from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rota.commands.flags import spread_lists
from rota.core.options import option, options_of


@dataclass(frozen=True, slots=True)
class Config:
    lora_paths: tuple[str, ...] = option((), "Adapters.")
    lora_policy: Literal["a", "b"] = option("a", "A policy.")


def spread(*arguments: str) -> list[str]:
    return spread_lists(list(arguments), options_of(Config).values())


def test_values_after_a_list_flag_belong_to_it_until_the_next_flag():
    assert spread("serve", "--lora-paths", "x", "y=1", "--lora-policy", "b", "model") == [
        "serve", "--lora-paths", "x", "--lora-paths", "y=1", "--lora-policy", "b", "model",
    ]  # fmt: skip


def test_a_flag_that_is_repeated_stays_as_it_is():
    typed = ["--lora-paths", "x", "--lora-paths", "y"]
    assert spread(*typed) == typed
