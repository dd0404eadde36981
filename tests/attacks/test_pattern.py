"""Attack 1: an adapter whose patterns never end to be matched."""

from __future__ import annotations

import pytest

from tests.attacks.live import neighbour, serving, with_config

BOMB = "([a-z0-9_.]+)+!"


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": BOMB},
        {"rank_pattern": {BOMB: 4}},
        {"alpha_pattern": {BOMB: 4}},
        {"layers_to_transform": [0], "layers_pattern": BOMB},
    ],
    ids=["target_modules", "rank_pattern", "alpha_pattern", "layers_pattern"],
)
def test_a_pattern_without_an_end_is_refused_and_nobody_notices(tmp_path, fields):
    with serving(tmp_path) as server:
        with_config(server.acme.root / "bomb", **fields)
        with neighbour(server) as gaps:
            answer = server.acme.put("acme-bomb", "bomb")

        assert answer.status_code == 400, answer.text
        assert not gaps.problems
        print(gaps, answer.json())
