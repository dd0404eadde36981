from __future__ import annotations

import gc

from rota.runtime.children import freeze_heap


def test_what_exists_when_a_process_freezes_its_heap_is_never_walked_again_and_what_comes_later_is():
    kept = [[]]
    try:
        freeze_heap()
        later = [[]]
        walked = {id(one) for one in gc.get_objects()}
        assert id(kept) not in walked
        assert id(later) in walked
    finally:
        gc.unfreeze()
