"""Addresses: which places they name, and what is none."""

from __future__ import annotations

import pytest

from rota.core.errors import AdapterError
from rota.sources.address import Address, has_scheme, is_repository, parse_address


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
