from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.core.errors import ConfigError
from rota.server.access.keys import group_scope, groups_of, salted_scope

NAMES = st.text(max_size=6)
# A group of names, and a salt or none.
SCOPES = st.tuples(st.frozensets(NAMES, min_size=1, max_size=3), st.none() | st.text(min_size=1, max_size=6))


def scope(names: frozenset[str], salt: str | None) -> str:
    return group_scope(names) if salt is None else salted_scope(group_scope(names), salt)


@given(SCOPES, SCOPES)
def test_two_scopes_are_the_same_only_if_their_names_and_salts_are(one, other):
    assert (scope(*one) == scope(*other)) == (one == other)


@given(st.text(min_size=1), SCOPES)
def test_no_salt_leads_from_a_server_without_keys_into_a_keys_scope(salt, other):
    assert salted_scope("", salt) not in ("", scope(*other))


def test_sharing_is_mutual_and_reaches_the_keys_of_keys():
    groups = groups_of({"a": ["b"], "b": [], "c": ["b"], "d": [], "e": ["d", "e"]})

    assert groups == {name: frozenset("abc") for name in "abc"} | {name: frozenset("de") for name in "de"}


def test_a_key_that_shares_with_all_joins_all():
    assert set(groups_of({"a": [], "b": None, "c": []}).values()) == {frozenset("abc")}


def test_a_name_that_no_key_has_is_said_in_a_sentence():
    with pytest.raises(ConfigError, match="'a': shares_prefixes_with names 'owl', and no key has that name"):
        groups_of({"a": ["owl"]})
