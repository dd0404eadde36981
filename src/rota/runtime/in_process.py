"""An engine in a thread of this process, for programs and tests to which a second process does not matter."""

from __future__ import annotations

import math
import threading
from contextlib import closing

from rota.core.config import EngineConfig
from rota.core.messages import Message
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.runtime.service import BuildDevice, Deliver, EngineService, ServicePhase, ServiceState, explain
from rota.scheduler import Scheduler


class InProcessService(EngineService):
    """The loop in a thread of this process. The thread builds the device, and closes it."""

    def __init__(self, build_device: BuildDevice, config: EngineConfig, end: str = "The engine was stopped.") -> None:
        """`end` is what is said of a service that was stopped."""
        super().__init__(config)
        self._build_device = build_device
        self._end = end
        self._inbox = ThreadInbox()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None  # that ended it

    def start(self, deliver: Deliver) -> None:
        super().start(deliver)
        self._thread = threading.Thread(target=self._serve, name="rota-engine", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        with self._lock:
            self._refuse_when_down()
            self._promises.note_message(message)
            self._inbox.post(message)

    def close(self) -> None:
        """End soon; waits for nothing, because a garbage collector may call it in any thread."""
        self._inbox.close()

    def stop(self) -> None:
        self.close()
        if self._thread:
            self._thread.join()

    def _serve(self) -> None:
        reason = self._end
        try:
            with closing(self._build_device()) as device:
                scheduler = Scheduler.from_config(self._config, device.capacity)
                self._board.set(ServiceState(phase=ServicePhase.READY, capacity=device.capacity, start=device.stages))
                run(scheduler, LiveWorld(device, self._inbox), self._on_events, self._config.scheduler.overlap_depth)
        except Exception as error:  # the border of a thread: all waiting clients must hear of any failure
            self.error, reason = error, explain(error)
        self._go_down(reason)


class ThreadInbox:
    """An inbox for messages from other threads of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._is_closed = False

    def post(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def close(self) -> None:
        """No message will follow; messages in the inbox are still taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def take(self, wait_s: float) -> list[Message] | None:
        with self._changed:
            if wait_s > 0.0:
                timeout_s = None if wait_s == math.inf else wait_s
                self._changed.wait_for(lambda: self._messages or self._is_closed, timeout_s)
            messages, self._messages = self._messages, []
            return None if self._is_closed and not messages else messages
