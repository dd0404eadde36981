"""What travels between front and engine cannot be read on its way."""

from __future__ import annotations

import pytest
from zmq.utils import z85

from rota.core.events import AdapterAdded, FinishReason
from rota.runtime.service import BuildDevice
from tests.builders import add_adapter, submit
from tests.fakes import FakeDevice
from tests.runtime.remote.elsewhere import Elsewheres
from tests.runtime.remote.plain import PlainDevice, speak_plainly
from tests.runtime.remote.relay import relays
from tests.runtime.services import supervised

PROMPT = tuple(range(97, 123))
REQUEST, NAME, PATH = "request-of-a-patient", "adapter-of-a-clinic", "adapters/of/a/clinic"
SECRETS = {
    "prompt": bytes(PROMPT),  # as msgpack writes such small numbers
    "request": REQUEST.encode(),
    "name": NAME.encode(),
    "path": PATH.encode(),
}


def captured(build_device: BuildDevice) -> tuple[bytes, bytes]:
    """All bytes between front and engine while a request of an adapter is served, and the front's secret key."""
    with relays() as between:
        elsewheres = Elsewheres(between.detour)
        with supervised(build_device, new_engine=elsewheres.new_engine) as (service, listener):
            adapter = add_adapter(1, name=NAME, path=PATH)
            service.send(adapter)
            listener.wait_for_adapter(1, AdapterAdded)
            service.send(submit(REQUEST, prompt=PROMPT, adapter=adapter.adapter.adapter_id))
            assert listener.wait_for_ending(REQUEST).reason is FinishReason.LENGTH
            secret = service._engine._line._keys.secret
        assert len(between.all) == 2, "both ways were recorded"
        return between.seen, secret


def found(capture: bytes) -> set[str]:
    return {name for name, secret in SECRETS.items() if secret in capture}


def test_a_capture_holds_no_prompt_no_name_and_no_key():
    capture, secret = captured(FakeDevice)

    assert len(capture) > 1000
    assert found(capture) == set()
    assert secret not in capture
    assert z85.decode(secret) not in capture


def test_without_keys_the_same_capture_would_hold_them(monkeypatch: pytest.MonkeyPatch):
    speak_plainly(monkeypatch)

    capture, _ = captured(PlainDevice())

    assert found(capture) == SECRETS.keys()
