from __future__ import annotations

import gc

from rota.runtime.settle import settle


def test_what_exists_when_a_process_settles_is_never_walked_again_and_what_comes_later_is():
    kept = [[]]
    try:
        settle()
        later = [[]]
        walked = {id(one) for one in gc.get_objects()}
        assert id(kept) not in walked
        assert id(later) in walked
    finally:
        gc.unfreeze()
