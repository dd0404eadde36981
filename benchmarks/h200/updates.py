"""Measures new versions of adapters beside 64 decodes: how soon a name means them, and what the decodes pay.

    python -m benchmarks.h200.updates [--only call,rate,cold,steps,features] [--out FILE] [--shape tiny] …

    call      PUT with a folder in memory and with the weights in the body, in turn: until the name is switched, and
              the gaps of a watched answer beside each of the two
    rate      20 updates a second: throughput and memory, against the same time without
    cold      adapters that lie on the disk alone: until their first token
    steps     the engine in this process: every step beside updates, by its own clock
    features  the engine in this process: a step with DoRA and with factors of the head, against LoRA of the same rank

Each part starts a server or engine of its own, adds to FILE what it found, and prints a line. A part that fails is told
and the next goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from .__main__ import prepare, say, server_options
from .decodes import Decodes, produced
from .feature_steps import feature_steps
from .gaps import GapWatch, Span, gaps_apart, gaps_of
from .memory_use import memory_use, process_use
from .over_http import HttpServer
from .server import Asked
from .shapes import SHAPES, Shape
from .stage import milliseconds
from .update_calls import CONFIG, WEIGHTS, first_token, in_memory, send, update
from .update_steps import update_steps

SLOTS = 8  # six are in use, and there is room for an old and a new version
USED = tuple(f"adapter{number}" for number in range(1, 7))
NAME, OTHER = "adapter7", "adapter8"  # get the updates
LIMIT_S = 120.0
# Between two updates of `call`: so long that each begins when the one before is over.
PAUSE_S = 0.1
UPDATES_AT_ONCE = 8
SETTLING = 3
LOOKS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What all parts are given."""

    folder: Path
    out: Path
    shape: Shape
    options: dict[str, Any]
    decodes: int
    tokens: int  # of an answer
    rounds: int
    seconds: float
    per_second: float
    precision: str  # of new versions

    @contextmanager
    def server(self, label: str, adapters: int, **options: Any) -> Iterator[tuple[HttpServer, httpx.Client]]:
        wanted = {"max_loras_per_batch": SLOTS, **self.options, **options}
        asked = Asked(self.folder, wanted, self.shape.config["vocab_size"], adapters, label)
        server = HttpServer(asked, self.out.parent)
        try:
            with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
                yield server, client
        finally:
            server.stop()

    @contextmanager
    def decoding(self, server: HttpServer, models: Sequence[str]) -> Iterator[GapWatch]:
        """All but one of the decodes, and a watch over the last one; the first steps are let pass."""
        with Decodes(server.url, models, self.decodes - 1, self.tokens) as decodes:
            watch = GapWatch(server.url, models[0], self.tokens)
            watch.wait()
            time.sleep(min(2.0, self.seconds))  # prompts are computed, and kernels compiled, before anything is timed
            yield watch
        assert not decodes.problems, decodes.problems[0]


def settle(client: httpx.Client, place: Path, *names: str) -> None:
    """The first versions pin memory, which later ones take over."""
    for name in names * SETTLING:
        update(client, name, place / "0")


def lengths(spans: Sequence[Span]) -> list[float]:
    return [end - begin for begin, end in spans]


def beside(watch: GapWatch, **kinds: list[Span]) -> dict[str, Any]:
    """Gaps between tokens of the watched answer: all of them, those while something of a kind was under way, and
    those in between, which show what the machine does by itself."""
    answers = watch.stop()
    every, apart = gaps_of(answers), gaps_apart(answers, [span for spans in kinds.values() for span in spans])
    found: dict[str, Any] = {"gap_ms": told(every), "gap_ms_apart": told(apart)}
    for kind, spans in kinds.items():
        met = gaps_of(answers, spans)
        found[f"gap_ms_beside_{kind}"] = told(met)
        if met:
            found[f"longest_beside_{kind}_by_median"] = round(max(met) / statistics.median(every), 2)
    return found


def told(gaps: list[float]) -> dict[str, float] | None:
    return milliseconds(gaps) if gaps else None


def measure_call(session: Session) -> dict[str, Any]:
    folders, bodies, firsts = list[Span](), list[Span](), list[float]()
    with (
        in_memory(session.folder / NAME, session.precision) as place,
        session.server("call", 7) as (server, client),
        session.decoding(server, USED) as watch,
    ):
        weights, config = (place / "0" / WEIGHTS).read_bytes(), (place / "0" / CONFIG).read_text()
        settle(client, place, NAME)
        for number in range(session.rounds):
            folders.append(update(client, NAME, place / str(number % 2)))
            firsts.append(first_token(client, NAME))
            time.sleep(PAUSE_S)  # as said there
            bodies.append(send(client, NAME, weights, config))
            firsts.append(first_token(client, NAME))
            time.sleep(PAUSE_S)  # as said there
        gaps = beside(watch, folders=folders, bodies=bodies)
    return {
        "bytes": len(weights),
        "folder_ms": milliseconds(lengths(folders)),
        "body_ms": milliseconds(lengths(bodies)),
        "first_token_after_ms": milliseconds(firsts),
        "every_folder_ms": [round(one * 1e3, 1) for one in lengths(folders)],
        "every_body_ms": [round(one * 1e3, 1) for one in lengths(bodies)],
        **gaps,
    }


def measure_rate(session: Session) -> dict[str, Any]:
    """Half of the time without updates goes before those with updates, half behind: machines grow warm."""
    with (
        in_memory(session.folder / NAME, session.precision) as place,
        session.server("rate", 8) as (server, client),
        session.decoding(server, USED) as watch,
    ):
        settle(client, place, NAME, OTHER)
        quiet = [tokens_per_s(client, session.seconds / 2)]
        before = memory_use(server.pid)
        with ThreadPoolExecutor(UPDATES_AT_ONCE) as pool:
            begun_at = time.monotonic()
            pacer = pool.submit(paced, pool, client, place, session)
            resident: list[float] = []
            busy = tokens_per_s(client, session.seconds, lambda: resident.append(process_use(server.pid)["VmRSS"]))
            spans = [one.result() for one in pacer.result()]
        taken_s = max(end for _, end in spans) - begun_at
        quiet.append(tokens_per_s(client, session.seconds / 2))
        after = memory_use(server.pid)
        gaps = beside(watch, updates=spans)
        versions = len(client.get(f"/v1/adapters/{NAME}").json()["versions"])
    return {
        "updates": len(spans),
        "updates_per_s": round(len(spans) / taken_s, 2),
        "update_ms": milliseconds(lengths(spans)),
        "tokens_per_s": round(busy),
        "tokens_per_s_without": [round(one) for one in quiet],
        "share": round(busy / statistics.mean(quiet), 4),
        "memory_mb_before": before,
        "memory_mb_after": after,
        "resident_mb_meanwhile": resident,
        "versions_left": versions,
        **gaps,
    }


def paced(pool: ThreadPoolExecutor, client: httpx.Client, place: Path, session: Session) -> list[Future[Span]]:
    """Updates begin when they are due, whether those before are over or not; each of two names takes one at a time."""
    begun_at, calls = time.monotonic(), list[Future[Span]]()
    for number in range(int(session.seconds * session.per_second)):
        time.sleep(max(0.0, begun_at + number / session.per_second - time.monotonic()))  # until the next is due
        calls.append(pool.submit(update, client, (NAME, OTHER)[number % 2], place / str(number // 2 % 2)))
    return calls


def tokens_per_s(client: httpx.Client, seconds: float, look: Callable[[], object] = lambda: None) -> float:
    """`look` is called some times meanwhile."""
    begun_at, before = time.monotonic(), produced(client)
    for _ in range(LOOKS):
        time.sleep(seconds / LOOKS)  # what is measured
        look()
    return (produced(client) - before) / (time.monotonic() - begun_at)


def measure_cold(session: Session) -> dict[str, Any]:
    """Sixteen adapters in turn, of which host memory holds four: each is read again, from the disk itself."""
    cold, warm, spans = list[float](), list[float](), list[Span]()
    with (
        session.server("cold", 16, max_loras_per_batch=4, max_loaded_loras=4) as (server, client),
        session.decoding(server, [client.get("/v1/models").json()["data"][0]["id"]]) as watch,
    ):
        for number in range(session.rounds):
            name = f"adapter{number % 16 + 1}"
            leave_page_cache(session.folder / name / WEIGHTS)
            begun_at = time.monotonic()
            cold.append(first_token(client, name))
            spans.append((begun_at, time.monotonic()))
            warm.append(first_token(client, name))
            time.sleep(PAUSE_S)  # as said there
        gaps = beside(watch, loads=spans)
    return {"cold_ms": milliseconds(cold), "warm_ms": milliseconds(warm), **gaps}


def leave_page_cache(file: Path) -> None:
    """The next read of a file reads the disk, where the file lies on one."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_steps(session: Session) -> dict[str, Any]:
    with in_memory(session.folder / NAME, session.precision) as place:
        options = {"max_loras_per_batch": SLOTS, **session.options}
        asked = Asked(session.folder, options, session.shape.config["vocab_size"], 7, "steps")
        return update_steps(asked, place, session.decodes, session.rounds, session.seconds)


def measure_features(session: Session) -> dict[str, Any]:
    return feature_steps(session.folder / "model", session.options, session.decodes, session.tokens)


PARTS: dict[str, Callable[[Session], dict[str, Any]]] = {
    "call": measure_call,
    "rate": measure_rate,
    "cold": measure_cold,
    "steps": measure_steps,
    "features": measure_features,
}


def measure(session: Session, parts: Sequence[str], facts: dict[str, Any]) -> int:
    found, failures = dict(facts), 0
    for name in parts:
        begun_at = time.monotonic()
        try:
            found[name] = PARTS[name](session)
        except Exception as error:  # time on such a machine is dear: the next part may do better
            traceback.print_exception(error)
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            failures += 1
        session.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        say(f"{name} ({time.monotonic() - begun_at:.0f} s): {json.dumps(found[name])}")
    return failures


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--rounds", type=int, default=50, help="of updates, and of cold adapters")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of updates one after the other, and of the same without"
    )
    parser.add_argument("--per-second", type=float, default=20.0, help="updates of `rate`")
    parser.add_argument("--decodes", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500, help="of an answer")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16", help="of new versions")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("h200-updates/updates.json"))
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--weights", choices=("disk", "dummy"), default="dummy", help="'dummy': drawn at every start")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="of every server, as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    shape, parts = SHAPES[asked.shape], asked.only.split(",")
    if unknown := [one for one in parts if one not in PARTS]:
        raise SystemExit(f"There is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}.")
    folder = asked.folder or Path(tempfile.gettempdir()) / f"rota-{shape.name}"
    facts = prepare(folder, shape, has_weights=asked.weights == "disk")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    session = Session(
        folder=folder,
        out=asked.out,
        shape=shape,
        options=server_options(shape, asked.weights, asked.set),
        decodes=asked.decodes,
        tokens=asked.tokens,
        rounds=asked.rounds,
        seconds=asked.seconds,
        per_second=asked.per_second,
        precision=asked.precision,
    )
    asked_for = {name: getattr(asked, name) for name in ("decodes", "weights", "precision")}
    return measure(session, parts, facts | asked_for)


if __name__ == "__main__":
    raise SystemExit(main())
