"""The field `rota` of answers, for /docs: what Rota tells beside the fields of each API."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class MoveBody(BaseModel):
    """Where an answer went on under another version of its adapter."""

    choice: int
    old: int = Field(alias="from")
    new: int = Field(alias="to")
    token: int  # tokens that the old version gave
    kv: Literal["keep", "recompute"]


class RotaBody(BaseModel):
    """Of an answer that was moved to a new version. All other answers have no such field.

    Which version of an adapter gave an answer, the header `x-rota-adapter-version` says.
    """

    moves: list[MoveBody]
