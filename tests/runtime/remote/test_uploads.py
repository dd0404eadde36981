"""An engine elsewhere serves adapters that came in bodies, also after its death, and leaves nothing on its disk."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

from rota.core.adapter import Adapter
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, EngineRestarted, FinishReason
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFailed, Message, RemoveAdapter
from rota.runtime.spool import Spool
from tests.builders import add_adapter, submit
from tests.fakes import FakeDevice
from tests.runtime.remote.elsewhere import Elsewheres
from tests.runtime.services import supervised
from tests.waiting import until

WEIGHTS = bytes(range(256)) * 40_000  # of three pieces


class OtherMachine(FakeDevice):
    """Reads an adapter only on its own disk, and only if its content is what its name says."""

    def fetch(self, adapter: Adapter) -> Message:
        path = Path(adapter.path) / "adapter_model.safetensors"
        if os.environ["TMPDIR"] not in adapter.path or hashlib.sha256(path.read_bytes()).hexdigest() != adapter.name:
            return AdapterFailed(adapter_id=adapter.adapter_id, at=0.0, reason=f"{path} is not the upload.")
        return super().fetch(adapter)


def test_an_upload_is_served_elsewhere_until_it_is_removed(tmp_path: Path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    folder = (spool := Spool(here)).new_folder()
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    monkeypatch.setenv("TMPDIR", str(there))
    name = hashlib.sha256(WEIGHTS).hexdigest()
    with supervised(OtherMachine, new_engine=Elsewheres().new_engine) as (service, listener):
        service.send(add_adapter(1, name=name, path=str(folder), root=str(spool.root)))
        listener.wait_for_adapter(1, AdapterAdded)
        os.kill(service.engine_pid, signal.SIGKILL)
        assert until(lambda: any(isinstance(event, EngineRestarted) for event in listener.events))
        service.send(submit("again", max_new_tokens=2, adapter=AdapterId(1)))
        assert listener.wait_for_ending("again").reason is FinishReason.LENGTH
        service.send(RemoveAdapter(adapter_id=AdapterId(1), at=0.0))
        listener.wait_for_adapter(1, AdapterRemoved)
        assert until(lambda: not list(there.glob("rota-spool-*/*/*"))), "its files are still there"
        service.send(add_adapter(2, name="another content", path=str(folder), root=str(spool.root)))
        refused = listener.wait_for_adapter(2, AdapterRefused)
        assert "is not the upload" in refused.reason
        assert until(lambda: not list(there.glob("rota-spool-*/*/*")))
    assert not list(there.glob("rota-spool-*"))
