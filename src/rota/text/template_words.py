"""A template's words tell what it knows: the texts that it writes or compares, and the names that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TemplateWords:
    """`data`: texts outside of expressions. `constants`: texts inside of them. `names`: variables."""

    data: tuple[str, ...]
    constants: tuple[str, ...]
    names: frozenset[str]


def words_of(trees: Sequence[Any]) -> TemplateWords:
    """All words of parsed templates."""
    from jinja2 import nodes

    constants = [node.value for tree in trees for node in tree.find_all(nodes.Const)]
    return TemplateWords(
        tuple(node.data for tree in trees for node in tree.find_all(nodes.TemplateData)),
        tuple(value for value in constants if isinstance(value, str)),
        frozenset(node.name for tree in trees for node in tree.find_all(nodes.Name)),
    )
