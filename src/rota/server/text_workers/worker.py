"""The main function of a worker process: it reads bodies, one at a time, until its server ends."""

from __future__ import annotations

import pickle
import resource
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from rota.core.errors import Fault, FaultCode, RequestError
from rota.server.memory_limit import limit_memory
from rota.server.prompts import Texts
from rota.server.text_workers.job import Done, Order
from rota.text.tokenizer import Tokenizer

# The first message of a worker.
READY = b"ready"
# A worker that still holds this much after a job has kept memory that nothing will need again.
_KEPT_BYTES = 2**29


def worker_main(connection: Connection, folder: Path) -> None:
    """Its first message says that it is ready."""
    tokenizer = Tokenizer(folder)
    limit_memory()
    connection.send_bytes(READY)
    while True:
        order: Order = pickle.loads(connection.recv_bytes())
        done = _done(order, tokenizer, connection.recv_bytes())
        connection.send_bytes(pickle.dumps(done, pickle.HIGHEST_PROTOCOL))
        if done.is_last:
            return


def _done(order: Order, tokenizer: Tokenizer, raw: bytes) -> Done:
    try:
        result = order.work(Texts(tokenizer, order.limits, order.parsers), raw)
    except RequestError as error:
        return Done(fault=error.fault, is_last=_is_too_large())
    except MemoryError:
        message = "Reading the body took too much memory; send a smaller body."
        return Done(fault=Fault(FaultCode.BODY_TOO_LARGE, message), is_last=True)
    # Broad: the server raises it again. It answers with a 500 and logs the traceback.
    except Exception:
        return Done(traceback=traceback.format_exc(), is_last=True)
    return Done(result=result, is_last=_is_too_large())


def _is_too_large() -> bool:
    if sys.platform != "linux":
        return False
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() > _KEPT_BYTES
