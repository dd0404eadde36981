"""Addresses: which places they name, what is none, and that no path leads out of a root."""

from __future__ import annotations

import pytest

from rota.core.errors import AdapterError
from rota.sources.address import Address, address_of, has_scheme, hide_root, is_repository, parse_address


@pytest.mark.parametrize(
    ("path", "scheme", "place"),
    [
        ("s3://bucket/legal/v7", "s3", "bucket/legal/v7"),
        ("s3://bucket/legal/", "s3", "bucket/legal"),
        ("gs://bucket/a", "gs", "bucket/a"),
        ("az://container/a", "az", "container/a"),
        ("hf://acme/legal@v2/best", "hf", "acme/legal@v2/best"),
        ("acme/legal-7.1", "hf", "acme/legal-7.1"),
    ],
)
def test_a_place_of_a_source(path: str, scheme: str, place: str):
    assert parse_address(path) == Address(scheme, place)


def test_a_digest_comes_back_from_its_text():
    exact = parse_address("s3://bucket/legal").with_digest("0123abcd")
    assert str(exact) == "s3://bucket/legal#0123abcd"
    assert parse_address(str(exact)) == exact


@pytest.mark.parametrize(
    "path",
    [
        "ftp://host/a",
        "s3://",
        "s3:///",
        "s3://b/../c",
        "s3://b//c",
        "s3://b/./c",
        "s3://b/%2e%2e/c",
        "s3://b\\c",
        "s3://b/c?versionId=1",
        "s3://b/c\n",
        "x y",
    ],
)
def test_what_is_no_place_is_refused(path: str):
    with pytest.raises(AdapterError):
        parse_address(path)


def test_what_may_be_a_repository_and_what_has_a_scheme():
    assert is_repository("acme/legal")
    assert not any(map(is_repository, ("legal", "/acme/legal", "./legal", "a/b/c", "../legal", "acme/")))
    assert has_scheme("s3://bucket/x")
    assert not has_scheme("acme/legal")


def test_a_root_holds_what_lies_below_it_and_no_neighbour():
    root = parse_address("s3://bucket/acme")
    inside = ("s3://bucket/acme", "s3://bucket/acme/legal")
    outside = ("s3://bucket/acme2/legal", "s3://bucket", "gs://bucket/acme/legal", "s3://other/acme/legal")
    assert all(parse_address(path).lies_in(root) for path in inside)
    assert not any(parse_address(path).lies_in(root) for path in outside)


# ── places in a root ──────────────────────────────────────────────────────────────────────────────────────────────────

ROOT = "s3://bucket/team"


def test_without_a_root_a_path_is_a_folder_or_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "here").mkdir(parents=True)
    assert address_of("/adapters/legal") is None
    assert address_of("./acme/legal") is None
    assert address_of("acme/here") is None, "a folder of that name is here"
    assert str(address_of("acme/legal")) == "hf://acme/legal"
    assert str(address_of("s3://bucket/legal")) == "s3://bucket/legal"


def test_below_an_address_relative_paths_start_there():
    assert str(address_of("legal", ROOT)) == "s3://bucket/team/legal"
    assert str(address_of("acme/legal", ROOT)) == "s3://bucket/team/acme/legal", "no name on the Hub"
    assert str(address_of("s3://bucket/team/legal#12ab", ROOT)) == "s3://bucket/team/legal#12ab"
    assert str(address_of("legal@v2", key_root="hf://acme")) == "hf://acme/legal@v2"


OUTSIDE = (
    "..",
    "../team2/legal",
    "legal/../../team2",
    "%2e%2e/team2",
    "legal/%2e%2e/%2e%2e/team2",
    "/etc/adapters",
    "//bucket/team2",
    "legal?prefix=/team2",
    "legal\\..\\..\\team2",
    "legal\n",
    ".",
    "s3://bucket/team2",
    "s3://bucket/team2/legal",
    "s3://bucket/teams",
    "s3://bucket",
    "s3://other/team/legal",
    "s3://bucket/team/../team2",
    "s3://bucket/TEAM/legal",
    "s3://bucket@other/team/legal",
    "S3://bucket/team2/legal",
    "gs://bucket/team/legal",
    "hf://bucket/team",
    "file:///etc/adapters",
)


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("of_key", [False, True])
def test_nothing_outside_of_an_address_is_reached(path, of_key):
    with pytest.raises(AdapterError):
        address_of(path, None if of_key else ROOT, ROOT if of_key else None)


def test_a_keys_root_takes_the_place_of_the_servers():
    assert str(address_of("legal", "s3://bucket", "s3://bucket/team")) == "s3://bucket/team/legal"
    with pytest.raises(AdapterError, match="leads out of the adapter root of this key"):
        address_of("s3://bucket/other", "s3://bucket", "s3://bucket/team")


def test_a_folder_as_a_root_lets_no_address_in():
    with pytest.raises(AdapterError, match="s3://bucket/legal lies outside the adapter root /adapters"):
        address_of("s3://bucket/legal", "/adapters")
    assert address_of("acme/legal", "/adapters") is None


def test_what_a_key_reads_starts_at_its_root():
    assert hide_root("There is nothing at s3://bucket/team/legal.", ROOT) == "There is nothing at legal."
    assert hide_root("There is nothing at s3://bucket/team.", None) == "There is nothing at s3://bucket/team."
