"""Attack 7: a route to an adapter that its key may not use any more."""

from __future__ import annotations

import pytest

from tests.attacks.live import good_adapter, neighbour, serving


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
