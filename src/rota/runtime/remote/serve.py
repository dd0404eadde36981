"""What another machine runs for a front that invites it: today's engine process, with a guarded line to the front."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import zmq

from rota.core.config import EngineConfig
from rota.core.errors import EngineDiedError
from rota.runtime.children import start_child
from rota.runtime.patience import KILL_S, LINGER_S
from rota.runtime.process import engine_main
from rota.runtime.remote.invitation import Invitation, Joined, OnJoined
from rota.runtime.remote.line import GuardedLine
from rota.runtime.service import BuildDevice

# The exit code of an engine whose front is gone, or cannot be reached any more. It must not hold a GPU.
LINE_LOST = 75
# The answer to an invitation takes the way that the invitation took.
_FRONT_S = 60.0


def run_invited(
    build_device: BuildDevice, config: EngineConfig, invitation: Invitation, host: str, tell: OnJoined
) -> int:
    """Run an engine until its end and return its exit code; `tell` is called once it listens at `host`.

    The engine dies with the thread that calls this, and with its process.
    """
    answers, teller = multiprocessing.Pipe(duplex=False)
    endpoints = InvitedEndpoints(invitation, host, teller)
    process = multiprocessing.get_context("spawn").Process(
        target=engine_main, args=(build_device, config, endpoints), name="rota-engine", daemon=True
    )
    try:
        start_child(process)
        teller.close()  # so that an engine that dies before its answer closes the pipe
        with answers, suppress(EOFError):
            tell(answers.recv())
        process.join()
    finally:
        if process.pid is not None:
            process.kill()
            process.join(KILL_S)
    # A process inside a broken driver may outlive even this, for a while.
    return -signal.SIGKILL if process.exitcode is None else process.exitcode


@dataclass(frozen=True, slots=True)
class InvitedEndpoints:
    """The engine's process makes its own keys, and tells the process that started it the public one."""

    invitation: Invitation
    host: str
    teller: Connection

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> GuardedLine:
        line = GuardedLine(context, partial(os._exit, LINE_LOST), LINGER_S)
        address = line.listen(self.host)
        line.expect(self.invitation.front_key)
        self.teller.send(Joined(messages=address, engine_key=line.public_key, node=self.host, pid=os.getpid()))
        self.teller.close()
        # The front lets this engine in before it connects itself.
        if not line.wait_for_guest(_FRONT_S):
            raise EngineDiedError(f"The front did not connect within {_FRONT_S:g} seconds.")
        line.connect(self.invitation.events, self.invitation.front_key)
        # A socket that is closed during its handshake may drop its last words.
        if not line.wait_until_connected(_FRONT_S):
            raise EngineDiedError(f"The front at {self.invitation.events} could not be reached.")
        return line

    def remove(self) -> None:
        """There is nothing on a disk."""
