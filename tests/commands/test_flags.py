from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rota.commands.flags import followers_in, spread_lists
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


def test_a_first_value_may_stand_behind_an_equals_sign():
    assert spread("--lora-paths=a=/x", "b", "--lora-policy=b", "model") == [
        "--lora-paths=a=/x", "--lora-paths", "b", "--lora-policy=b", "model",
    ]  # fmt: skip


def test_values_without_a_flag_of_their_own_are_known():
    typed = ["serve", "model", "--lora-paths", "a", "b", "--lora-paths=c", "d", "--lora-policy", "b", "e"]
    assert followers_in(typed, options_of(Config).values()) == ["b", "d"]
