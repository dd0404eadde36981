"""Page limits say which adapters are too large for the pages that slots share."""

from __future__ import annotations

from rota.scheduler.books import Books
from rota.scheduler.group import Group

_ADVICE = "start the server with a larger --lora-memory-share, or with this adapter among its --lora-paths"


def too_many_pages(books: Books, group: Group, pages: int) -> str:
    """Why an adapter that takes so many pages is refused; empty if it is not.

    Beside pinned adapters one slot stays open, so that every other adapter can still get its turn.
    """
    shared, slots = books.slots.pages, books.slots
    if shared is None or group.adapter is None:
        return ""
    left = shared.open_with(group.adapter_id, pages)
    if left >= slots.total:
        return ""
    pinned, takes = len(books.pinned), f"Adapter '{group.adapter.name}' takes {pages} pages of eight ranks"
    if not left:
        return f"{takes}, but the slots share {shared.total}; {_ADVICE}."
    if left > pinned:
        return ""
    return (
        f"{takes}: with it {left} of {slots.most} slots could be open, but {pinned + 1} must be, {pinned} of them for "
        f"pinned adapters; unload a pinned one, or {_ADVICE}."
    )
