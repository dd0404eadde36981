"""Attack 6: a body that pauses, so that its name has another owner, or its key other rights, when it is complete."""

from __future__ import annotations

import pytest

from tests.attacks.live import BUILT_IN, good_adapter, neighbour, serving


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
