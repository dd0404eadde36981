from __future__ import annotations

from rota.runtime.remote.keys import KeyPair


def test_a_secret_key_is_not_shown():
    pair = KeyPair.new()

    assert pair.public in repr(pair)
    assert pair.secret.decode() not in repr(pair)
    assert KeyPair.new() != pair
