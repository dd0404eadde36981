"""Attack 4: a name below `--lora-resolver` that is a link to another tenant's adapter, or holds one."""

from __future__ import annotations

import pytest

from tests.attacks.live import WEIGHTS, good_adapter, neighbour, serving


@pytest.mark.long("it starts a whole server")
def test_a_name_leads_to_no_other_tenants_adapter_and_every_load_has_its_line(tmp_path, record_property):
    with serving(tmp_path, "--lora-resolver", str(tmp_path / "root")) as server:
        acme, birds = server.acme.root, server.birds.root
        good_adapter(birds / "secret", "haiku")
        good_adapter(acme / "mine", "french")
        for name, target in {"link": "../birds/secret", "dangling": "../birds/nothing"}.items():
            (acme / name).symlink_to(target)
        for name, target in {"file": "secret", "no-file": "nothing"}.items():
            good_adapter(acme / name, "french")
            (acme / name / WEIGHTS).unlink()
            (acme / name / WEIGHTS).symlink_to(f"../../birds/{target}/{WEIGHTS}")

        with neighbour(server) as gaps:
            outside = {name: server.acme.ask(f"acme/{name}") for name in ("link", "dangling", "file", "no-file")}
            for_boss = [server.boss.ask(f"acme/{name}") for name in ("link", "file")]
            missing, mine = server.acme.ask("acme/nothing"), server.acme.ask("acme/mine")
        record_property("gaps", str(gaps))

        texts = {answer.text.replace(f"acme/{name}", "NAME") for name, answer in outside.items()}
        assert {answer.status_code for answer in outside.values()} == {400}
        assert len(texts) == 1, "what lies outside does not show"
        assert str(tmp_path) not in texts.pop()
        assert [answer.status_code for answer in for_boss] == [400, 400], "the links are acme's, whoever follows them"
        assert (missing.status_code, mine.status_code) == (404, 200)
        assert not gaps.problems

        lines = {line["adapter"]: (line["key"], line["outcome"] == "ok") for line in server.acts("load")}
        assert lines["acme/mine"] == ("acme", True)
        assert {lines[f"acme/{name}"][1] for name in outside} == {False}
        assert "acme/nothing" not in lines
