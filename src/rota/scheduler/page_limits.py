"""Page limits say which adapters are too large for the pages and the places of matrices that slots share."""

from __future__ import annotations

from rota.scheduler.books import Books
from rota.scheduler.group import Group
from rota.scheduler.pages import PageLedger

_ADVICE = "start the server with a larger --lora-memory-share, or with this adapter among its --lora-paths"


def too_large(books: Books, group: Group, pages: int, matrices: int = 0) -> str:
    """Why an adapter that takes so many pages and matrices is refused; empty if it is not."""
    if group.adapter is None:
        return ""
    takes = f"Adapter '{group.adapter.name}' takes"
    shared = books.slots.pages
    reason = "" if shared is None else _too_many(books, group, shared, pages, f"{takes} {pages} pages of eight ranks")
    whole = f"{takes} {matrices} places for an embedding or a head of its own"
    return reason or (_too_many(books, group, books.slots.matrices, matrices, whole) if matrices else "")


def _too_many(books: Books, group: Group, shared: PageLedger, count: int, takes: str) -> str:
    """Beside pinned adapters one slot stays open, so that every other adapter can still get its turn."""
    slots, left = books.slots, shared.open_with(group.adapter_id, count)
    if left >= slots.total:
        return ""
    pinned = len(books.pinned)
    if not left:
        return f"{takes}, but the slots share {shared.total}; {_ADVICE}."
    if left > pinned:
        return ""
    return (
        f"{takes}: with it {left} of {slots.most} slots could be open, but {pinned + 1} must be, {pinned} of them for "
        f"pinned adapters; unload a pinned one, or {_ADVICE}."
    )
