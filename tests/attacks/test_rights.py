"""Attacks 6 to 8: bodies and routes that outlive a right, and bodies and adapters that leave no room for others."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from tests.attacks.live import BUILT_IN, KEYS, good_adapter, neighbour, serving
from tests.waiting import until

# Attack 6: a body that pauses, so that its name has another owner, or its key other rights, when it is complete.


@pytest.mark.long("a whole server, for half a minute")
def test_a_paused_body_gets_no_name_that_is_anothers_by_then(tmp_path, record_property):
    with serving(tmp_path) as server:
        good_adapter(server.birds.root / "own")
        with neighbour(server) as gaps:
            late = server.acme.pause("shared-owl", BUILT_IN / "pirate")
            assert server.birds.put("shared-owl", "own").status_code == 200
            status, text = late.finish()
            assert (status, "it is not this key's own" in text) == (403, True), text

            both = [one.pause("shared-crow", BUILT_IN / "pirate") for one in (server.acme, server.birds)]
            assert [one.finish()[0] for one in both] == [200, 403]

            revoked = server.acme.pause("acme-owl", BUILT_IN / "pirate")
            server.change_keys('adapters = ["acme-*", ', 'adapters = ["gone-*", ')
            status, text = revoked.finish()
            assert (status, "Key 'acme' may not load or unload 'acme-owl'" in text) == (403, True), text

        record_property("gaps", str(gaps))
        assert not gaps.problems
        assert (server.boss.owner_of("shared-owl"), server.boss.owner_of("shared-crow")) == ("birds", "acme")
        assert server.boss.client.get("/v1/adapters/shared-owl").json()["version"] == 1
        assert server.boss.client.get("/v1/adapters/acme-owl").status_code == 404


# Attack 7: a route to an adapter that its key may not use any more.


@pytest.mark.long("a whole server, for half a minute")
def test_a_route_ends_with_the_right_of_the_key_that_set_it(tmp_path, record_property):
    with serving(tmp_path) as server:
        good_adapter(server.acme.root / "own", "haiku")
        assert server.acme.put("acme-own", "own").status_code == 200
        routes = {"acme-own": server.acme, "french": server.boss}
        for name, tenant in routes.items():
            set_route = tenant.client.put(f"/v1/adapters/{name}/route", json={"targets": {"pirate": 1.0}})
            assert set_route.status_code == 200, set_route.text
        assert server.acme.ask("acme-own").json()["model"] == "pirate"

        with neighbour(server) as gaps:
            server.change_keys('"shared-*", "pirate"]', '"shared-*", "french"]')
            assert server.acme.ask("pirate").status_code == 403
            assert server.acme.ask("acme-own").json()["model"] == "acme-own"
            assert server.acme.ask("french").json()["model"] == "pirate", "an operator's route needs no right of others"
            refused = server.acme.client.put("/v1/adapters/acme-own/route", json={"targets": {"pirate": 1.0}})
            assert refused.status_code == 403
            server.change_keys('"shared-*", "french"]', '"shared-*", "pirate"]')
            assert server.acme.ask("acme-own").json()["model"] == "pirate"

        record_property("gaps", str(gaps))
        assert not gaps.problems


# Attack 8: many bodies that never end, and adapters without number, so that others find no room.

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
