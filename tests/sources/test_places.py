"""Which paths are addresses, and that no path leads out of a root."""

from __future__ import annotations

import pytest

from rota.core.errors import AdapterError
from rota.sources.address import address_of, hide_root

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
