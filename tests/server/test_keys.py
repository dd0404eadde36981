from __future__ import annotations

from pathlib import Path

import pytest

from rota.core.errors import ConfigError
from rota.server.access.key_file import read_keys
from rota.server.access.keys import Key, KeyRing, digest_of

DIGEST = digest_of("hoot").hex()


def key_file(tmp_path: Path, text: str, mode: int = 0o600) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def read(tmp_path: Path, text: str, mode: int = 0o600) -> KeyRing:
    return read_keys([], key_file(tmp_path, text, mode))


def test_a_key_of_the_command_line_may_do_everything():
    ring = read_keys(["first", "second"], None)

    assert ring.find("second") == Key("key 2")
    assert ring.find("second").may_use("anything")
    assert ring.find("third") is None


WHOLE = """
[keys.acme]
key = "sk-acme"
adapters = ["pirate", "acme-*"]
may_use_base = true
may_load = true
adapter_root = "acme"
may_operate = false
may_set_headers = true
requests_per_minute = 600
tokens_per_minute = 200_000
max_tokens_in_flight = 50_000
max_adapters = 100
max_adapter_bytes = 10_000_000_000
max_uploads = 2
max_running = 32
max_queued = 256
weight = 2
priority = 1
shares_prefixes_with = "all"

[keys.birds]
key = "sk-birds"
"""


def test_a_key_of_the_file_has_what_the_file_gives(tmp_path):
    ring = read_keys([], key_file(tmp_path, WHOLE), str(tmp_path / "adapters"))

    assert ring.find("sk-acme") == Key(
        "acme",
        adapters=frozenset({"pirate", "acme-*"}),
        may_use_base=True,
        may_load=True,
        may_operate=False,
        requests_per_minute=600,
        tokens_per_minute=200_000,
        max_tokens_in_flight=50_000,
        max_adapters=100,
        max_adapter_bytes=10_000_000_000,
        max_uploads=2,
        max_running=32,
        max_queued=256,
        weight=2.0,
        priority=1,
        shares_prefixes_with=frozenset({"birds"}),
        adapter_root=str(tmp_path / "adapters" / "acme"),
    )


def test_keys_share_prefixes_with_keys_that_list_them_and_with_keys_of_the_command_line(tmp_path):
    text = '[keys.a]\nkey = "a"\nshares_prefixes_with = ["b", "key 1"]\n[keys.b]\nkey = "b"\n[keys.c]\nkey = "c"'
    ring = read_keys(["first"], key_file(tmp_path, text))

    scopes = {secret: ring.find(secret).cache_scope for secret in ("first", "a", "b", "c")}
    assert scopes["first"] == scopes["a"] == scopes["b"] != scopes["c"]
    assert ring.find("b").shares_prefixes_with == {"a", "key 1"}


def test_two_keys_of_one_name_would_be_one_tenant_and_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Two keys are named 'key 1'; rename the key of the key file"):
        read_keys(["first"], key_file(tmp_path, '[keys."key 1"]\nkey = "x"'))


def test_a_right_that_the_file_does_not_give_is_not_there(tmp_path):
    key = read(tmp_path, '[keys.bare]\nkey = "secret"').find("secret")

    assert key == Key(
        "bare", adapters=frozenset(), may_use_base=False, may_load=False, may_operate=False, may_set_headers=False
    )
    assert not key.may_use("pirate")


@pytest.mark.parametrize(
    ("adapters", "name", "may"),
    [
        ('["pirate"]', "pirate", True),
        ('["pirate"]', "pirates", False),
        ('["acme-*"]', "acme-poet", True),
        ('["acme-*"]', "acm", False),
        ('["*"]', "anything", True),
        ('"all"', "anything", True),
    ],
)
def test_a_name_is_on_the_list_itself_or_by_its_beginning(tmp_path, adapters, name, may):
    key = read(tmp_path, f'[keys.acme]\nkey = "secret"\nadapters = {adapters}').find("secret")

    assert key.may_use(name) is may


def test_a_digest_in_the_file_stands_for_a_key(tmp_path):
    ring = read(tmp_path, f'[keys.owl]\nkey_sha256 = "{DIGEST}"', mode=0o644)

    assert ring.find("hoot").name == "owl"
    assert ring.find(DIGEST) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[keys.a]\nkey = "x"\nadapter = ["pirate"]',
            "'a' has a field 'adapter'; the fields are key, key_sha256, adapters",
        ),
        ('[key.a]\nkey = "x"', r"'key' is not known here; a key is a table \[keys.NAME\]"),
        ("", "there are no keys"),
        ("keys = 3", "there are no keys"),
        ('keys.a = "x"', r"keys.a must be a table \[keys.a\]\.$"),
        ("[keys.a]\nmay_load = true", "'a' needs either key or key_sha256"),
        (f'[keys.a]\nkey = "x"\nkey_sha256 = "{DIGEST}"', "'a' needs either key or key_sha256"),
        ('[keys.a]\nkey_sha256 = "abc"', "key_sha256 must be 64 hexadecimal digits"),
        ('[keys.a]\nkey = "two words"', "'a': key must be a text of letters, digits and signs"),
        ("[keys.a]\nkey = 3", "'a': key must be a text"),
        ('[keys.a]\nkey = "x"\nadapters = "pirate"', "adapters must be 'all' or a list of names, not 'pirate'"),
        ('[keys.a]\nkey = "x"\nadapters = ["a*b"]', r"'\*' may stand at the end of a name only"),
        ('[keys.a]\nkey = "x"\nmay_load = 1', "may_load must be true or false, not 1"),
        ('[keys.a]\nkey = "x"\nadapter_root = 1', "adapter_root must be the path of a folder, not 1"),
        ('[keys.a]\nkey = "x"\nadapter_root = " "', "adapter_root must be the path of a folder, not ' '"),
        ('[keys.a]\nkey = "x"\nrequests_per_minute = 0', "requests_per_minute must be a whole number of at least 1"),
        ('[keys.a]\nkey = "x"\ntokens_per_minute = 1.5', "tokens_per_minute must be a whole number"),
        ('[keys.a]\nkey = "x"\nweight = inf', "weight must be a finite number above 0"),
        (
            '[keys.a]\nkey = "x"\nweight = 1e-320',
            "weight must be a finite number above 0, from 1e-6 to 1e6, not 1e-320",
        ),
        ('[keys.a]\nkey = "x"\nweight = 1e300', "weight must be a finite number above 0, from 1e-6 to 1e6"),
        ('[keys.a]\nkey = "x"\npriority = "high"', "priority must be a whole number from -100 to 100, not 'high'"),
        (f'[keys.a]\nkey = "x"\npriority = {"9" * 20}', "priority must be a whole number from -100 to 100, not 99"),
        ('[keys.a]\nkey = "x"\nmax_adapters = 0', "max_adapters must be a whole number of at least 1"),
        ('[keys.a]\nkey = "x"\nmax_uploads = 1.5', "max_uploads must be a whole number of at least 1"),
        ('[keys.a]\nkey = "x"\nmax_running = 0', "max_running must be a whole number of at least 1"),
        ('[keys.a]\nkey = "x"\nmax_queued = true', "max_queued must be a whole number"),
        ('[keys.a]\nkey = "x"\nmax_tokens_in_flight = -1', "max_tokens_in_flight must be a whole number"),
        ('[keys.a]\nkey = "x"\nshares_prefixes_with = "b"', "must be 'all' or a list of keys' names, not 'b'"),
        ('[keys.a]\nkey = "x"\nshares_prefixes_with = ["b"]', "names 'b', and no key has that name"),
        ('[keys.""]\nkey = "x"', "A key has an empty name"),
        ('[keys.a]\nkey = "x"\n[keys.b]\nkey = "x"', "'a' and 'b' have the same key"),
        ("[keys", "is not TOML"),
    ],
)
def test_what_is_wrong_with_a_key_file_is_said_in_a_sentence(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("field", "mode", "words"),
    [
        ('key = "x"', 0o644, "every user of this machine may read its keys; chmod o-r, or store key_sha256"),
        ('key = "x"', 0o602, "every user of this machine may write to it"),
        (f'key_sha256 = "{DIGEST}"', 0o666, "every user of this machine may write to it"),
        ('key = "x"', 0o640, None),
        (f'key_sha256 = "{DIGEST}"', 0o644, None),
    ],
)
def test_a_file_whose_secrets_lie_open_is_refused(tmp_path, field, mode, words):
    if words is None:
        assert read(tmp_path, f"[keys.a]\n{field}", mode)
    else:
        with pytest.raises(ConfigError, match=words):
            read(tmp_path, f"[keys.a]\n{field}", mode)


def test_a_file_that_is_not_there_is_said_in_a_sentence():
    with pytest.raises(ConfigError, match=r"Cannot read the key file /nowhere/keys\.toml: No such file"):
        read_keys([], "/nowhere/keys.toml")


def test_a_refusal_does_not_repeat_the_secret():
    with pytest.raises(ConfigError) as refused:
        read_keys(["a secret with spaces"], None)
    assert "secret" not in str(refused.value)


def test_every_digest_is_compared_also_after_the_right_one(monkeypatch):
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr("rota.server.access.keys.hmac.compare_digest", compare)
    ring = read_keys(["first", "second", "third"], None)

    assert ring.find("first").name == "key 1"
    assert compared == [digest_of("first"), digest_of("second"), digest_of("third")]


def rooted(tmp_path: Path, fields: str, root: str | None = "{folder}/adapters") -> Key | None:
    """The key of a file with these fields, on a server with this adapter root."""
    (tmp_path / "adapters" / "acme").mkdir(parents=True, exist_ok=True)
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    file = key_file(tmp_path, f'[keys.acme]\nkey = "x"\n{fields.format(folder=tmp_path)}')
    return read_keys([], file, root and root.format(folder=tmp_path)).find("x")


@pytest.mark.parametrize(
    "given", ["acme", "./acme/", "{folder}/adapters/acme", "acme/deep/..", "../adapters/acme", "inside"]
)
def test_the_root_of_a_key_is_a_folder_below_the_servers(tmp_path, given):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "inside").symlink_to("acme")
    key = rooted(tmp_path, f'adapter_root = "{given}"')

    assert key.adapter_root == str(tmp_path / "adapters" / "acme")


def test_the_servers_root_may_be_reached_by_a_link(tmp_path):
    (tmp_path / "link").symlink_to("adapters")
    key = rooted(tmp_path, 'adapter_root = "acme"', "{folder}/link")

    assert key.adapter_root == str(tmp_path / "adapters" / "acme")


def test_the_root_of_a_key_may_be_made_later(tmp_path):
    assert rooted(tmp_path, 'adapter_root = "later"').adapter_root == str(tmp_path / "adapters" / "later")


@pytest.mark.parametrize(
    "given",
    [".", "..", "../elsewhere", "acme/../../elsewhere", "/etc", "/", "{folder}/adapters", "{folder}/adapters-b", "out"],
)
def test_a_root_that_is_not_below_the_servers_is_refused(tmp_path, given):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"'acme': adapter_root .* is not below the server's adapter root"):
        rooted(tmp_path, f'adapter_root = "{given}"')


def test_a_root_that_no_system_can_follow_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'acme': adapter_root .* is no path that can be followed"):
        rooted(tmp_path, 'adapter_root = "a\\u0000b"')


def test_a_root_on_a_server_without_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'acme' has an adapter_root, and the server has none; .*--adapter-root DIR"):
        rooted(tmp_path, 'adapter_root = "acme"', None)


def test_a_key_that_may_load_and_has_no_root_is_refused_with_the_line_to_add(tmp_path):
    with pytest.raises(ConfigError, match=r"'acme' may load .* own: add the line adapter_root = \"NAME\" to it"):
        rooted(tmp_path, "may_load = true")
    with pytest.raises(ConfigError, match=r"start the server with --adapter-root DIR and add the line"):
        rooted(tmp_path, "may_load = true", None)


@pytest.mark.parametrize("fields", ["", "may_load = false", "may_load = true\nmay_operate = true"])
def test_a_key_that_loads_nothing_and_an_operators_need_no_root(tmp_path, fields):
    assert rooted(tmp_path, fields).adapter_root is None


def test_a_secret_in_the_wrong_place_is_not_repeated(tmp_path):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, '[keys]\nacme = "sk-hush"')
    assert "hush" not in str(refused.value)
