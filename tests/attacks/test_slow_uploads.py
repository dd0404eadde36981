"""Attack 8: many bodies that never end, and adapters without number, so that others find no room."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from tests.attacks.live import BUILT_IN, KEYS, good_adapter, neighbour, serving
from tests.waiting import until

BYTES = (BUILT_IN / "pirate" / "adapter_model.safetensors").stat().st_size
LIMITED = KEYS.replace('key = "acme"\n', f'key = "acme"\nmax_adapters = 3\nmax_adapter_bytes = {2 * BYTES}\n')


@pytest.mark.long("a whole server, for a minute")
def test_slow_bodies_of_one_key_keep_no_other_from_sending_and_expire(tmp_path, record_property):
    with serving(tmp_path, "--body-timeout", "5") as server, ExitStack() as slow:
        with neighbour(server) as gaps:
            bodies = [server.acme.pause(f"acme-{number}", BUILT_IN / "pirate") for number in range(10)]
            for one in bodies:
                slow.enter_context(closing(one))
            assert [one.began for one in bodies] == [True] * 8 + [False] * 2
            sent = [server.birds.pause(f"birds-{number}", BUILT_IN / "pirate").finish()[0] for number in range(10)]
            assert sent == [200] * 10

            # Their halves came at once, which must not give them hours.
            assert until(lambda: server.acme.pause("acme-new", BUILT_IN / "pirate").finish()[0] == 200)
        assert [one.finish()[0] for one in bodies[:1]] == [408]
        record_property("gaps", str(gaps))
        assert not gaps.problems


@pytest.mark.long("a whole server, for half a minute")
def test_a_key_takes_no_more_than_its_limits_and_others_notice_nothing(tmp_path, record_property):
    with serving(tmp_path, keys=LIMITED) as server:
        good_adapter(server.acme.root / "own")
        with neighbour(server) as gaps:
            sent = [server.acme.pause(f"acme-{number}", BUILT_IN / "pirate").finish() for number in range(3)]
            assert [status for status, _ in sent] == [200, 200, 403]
            assert "max_adapter_bytes" in sent[-1][1]
            loaded = [server.acme.put(f"acme-own-{number}", "own") for number in range(2)]
            assert [one.status_code for one in loaded] == [200, 403]
            assert "may load 3 adapters, its max_adapters" in loaded[-1].text
            assert server.birds.pause("birds-owl", BUILT_IN / "pirate").finish()[0] == 200
        record_property("gaps", str(gaps))
        assert not gaps.problems
