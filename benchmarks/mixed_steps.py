"""Measures steps with a prompt in them, as a graph and kernel by kernel: what frames of a fixed size are worth.

    python benchmarks/mixed_steps.py [--decodes 64 16 0] [--prompt-tokens 16 100 …] [--output FILE] [--shape tiny]

Plans are written by hand and two are in flight, over a Llama-8B shape with random weights. The engine is built without
graphs and every case runs; then it captures them and every case that fits a frame runs again. Every case leaves its
figures in FILE at once, so a run that is cut short is not lost.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from h200.assets import make_adapter, make_model
from h200.report import number, table
from h200.shapes import RANK, SHAPES, Shape
from h200.timed import Timed

from rota.core.adapter import Adapter
from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.ids import BASE, AdapterId, BlockId, RequestId, Row, Slot
from rota.core.messages import AdapterFailed, AdapterReady, Message
from rota.core.plan import Chunk, Load, Seat, StepPlan
from rota.core.request import SamplingParams
from rota.engine.build import build_engine
from rota.engine.engine import Engine
from rota.engine.step.frames import PromptRoom, mixed_frames

SIX = 6
CONTEXT = 300
BUDGET = SchedulerConfig().chunked_prefill_size
BLOCK_SIZE = CacheConfig().kv_block_size
SETTLING = 2  # steps before the first that counts; what is compiled or allocated, is so in the first
# One more ends each case: its time lacks the launching of a next step.
UNCOUNTED = SETTLING + 1
GRAPH, KERNELS = KINDS = "as_graph", "kernel_by_kernel"
STEP, SUBMIT = NAMES = "{}_ms", "submit_ms_{}"
WHAT = (
    "plans written by hand through Engine.submit and collect, two in flight; decodes at contexts of {context} tokens "
    "and a few, and one whole prompt a step; medians of {steps} steps. With adapters, decodes are dealt round to all "
    "and the prompt is the first one's: without decodes it is alone. Null: the step fits into no frame, or there is no "
    "GPU."
)


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of step: so many decodes and one prompt, of the base model or dealt to so many adapters."""

    decodes: int
    prompt_tokens: int
    adapters: int

    def __str__(self) -> str:
        return f"{self.decodes} decodes, {self.prompt_tokens:,} prompt tokens, {self.adapters} adapters"


@dataclass(frozen=True, slots=True)
class Author:
    """Writes plans; every row has blocks of its own, and keeps them from case to case."""

    rows: int
    context: int
    pages: int  # of each row
    vocabulary: int

    @property
    def prompt_row(self) -> Row:
        return Row(self.rows - 1)

    def contexts(self, count: int) -> Iterator[StepPlan]:
        """Steps that compute the contexts of so many rows."""
        at_once = BUDGET // self.context
        for first in range(0, count, at_once):
            yield self._seated(range(first, min(first + at_once, count)), 0, adapters=0)

    def rewound(self, case: Case) -> StepPlan:
        """A step after which the case's decodes stand at their contexts again: of each, the last token is computed."""
        return self._seated(range(case.decodes), self.context - 1, case.adapters)

    def step(self, case: Case, step_id: int) -> StepPlan:
        """Everybody decodes, and a newcomer's prompt is computed whole."""
        length = case.prompt_tokens
        return StepPlan(
            step_id=step_id,
            seats=(self._seat(self.prompt_row, length, length, AdapterId(1) if case.adapters else BASE, step_id),),
            chunks=(Chunk(row=self.prompt_row, start=0, length=length, samples=True),),
            decodes=tuple(Row(row) for row in range(case.decodes)),
            context_tokens=case.decodes * self.context + length,
            adapters=min(case.adapters, max(case.decodes, 1)),
        )

    def _seated(self, rows: Iterable[int], start: int, adapters: int) -> StepPlan:
        """Rows sit down, and compute their contexts from `start` on."""
        room = self.pages * BLOCK_SIZE
        users = [AdapterId(1 + row % adapters) if adapters else BASE for row in rows]
        seats = [self._seat(Row(row), self.context, room, user, row) for row, user in zip(rows, users, strict=True)]
        chunks = [Chunk(row=seat.row, start=start, length=self.context - start, samples=True) for seat in seats]
        return StepPlan(step_id=0, seats=tuple(seats), chunks=tuple(chunks), adapters=min(adapters, len(seats)))

    def _seat(self, row: Row, length: int, room: int, adapter: AdapterId, salt: int) -> Seat:
        tokens = tuple((salt * 7919 + place * 31) % self.vocabulary for place in range(length))
        first = row * self.pages
        blocks = tuple(BlockId(first + page) for page in range(pages_for(room)))
        return Seat(
            request_id=RequestId(f"r{row}"),
            row=row,
            adapter_id=adapter,
            tokens=tokens,
            prompt_length=length,
            blocks=blocks,
            sampling=SamplingParams(temperature=0.0),
        )


def pages_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def fits_a_frame(plan: StepPlan, rows: int) -> bool:
    """Whether an engine of so many rows that has captured its graphs has one for this step."""
    return any(frame.holds(plan) for frame in mixed_frames(rows, PromptRoom(BUDGET)))


def drive(device: Timed, plans: Iterable[StepPlan]) -> None:
    """Two in flight, in the order of the real loop: the next step is submitted before this one is waited for."""
    flying = None
    for plan in plans:
        following = device.submit(plan)
        if flying is not None:
            device.collect(flying)
        flying = following
    if flying is not None:
        device.collect(flying)


def measure(engine: Engine, author: Author, case: Case, steps: int) -> tuple[float, float]:
    """Milliseconds from step to step, and of them in `submit`."""
    if case.decodes:
        engine.collect(engine.submit(author.rewound(case)))
    device = Timed(engine)
    # All before the first: writing a plan is no part of a step.
    drive(device, [author.step(case, step_id) for step_id in range(steps + UNCOUNTED)])
    counted = device.steps[SETTLING:-1]
    assert len(counted) == steps
    step_s = statistics.median(step.seconds for step in counted)
    return round(step_s * 1e3, 2), round(statistics.median(step.submit_s for step in counted) * 1e3, 2)


class Figures:
    """What was measured so far, in the file after every case."""

    def __init__(self, cases: Iterable[Case], facts: dict[str, Any], output: Path | None) -> None:
        self._facts = facts
        self._output = output
        names = [name.format(kind) for name in NAMES for kind in KINDS]
        self.of_case: dict[Case, dict[str, Any]] = {case: asdict(case) | dict.fromkeys(names) for case in cases}

    def note(self, case: Case, kind: str, step_ms: float, submit_ms: float) -> None:
        self.of_case[case] |= {STEP.format(kind): step_ms, SUBMIT.format(kind): submit_ms}
        print(f"{case}, {kind.replace('_', ' ')}: {step_ms:.2f} ms, submit {submit_ms:.2f} ms", flush=True)
        if self._output:
            told = {**self._facts, "steps": list(self.of_case.values())}
            self._output.write_text(json.dumps(told, indent=1) + "\n", "utf-8")

    def report(self, decodes: int) -> str:
        """The steps with so many decodes; each cell is the graph's time and the other."""
        lengths = sorted({case.prompt_tokens for case in self.of_case})
        rows = [
            [f"{length:,}", *(self._pair(Case(decodes, length, count), name) for name in NAMES for count in (0, SIX))]
            for length in lengths
        ]
        heads = ("base: graph / kernel by kernel, ms", "six adapters", "base: submit, ms", "six adapters: submit")
        return "\n".join(table((f"{decodes} decodes and … prompt tokens", *heads), rows))

    def _pair(self, case: Case, name: str) -> str:
        return " / ".join(number(self.of_case[case][name.format(kind)]) for kind in KINDS)


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decodes", type=int, nargs="+", default=[64, 16, 0], help="sequences that decode in a step")
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", default=[16, 100, 250, 500, 1000, 1900], help="tokens of the prompt"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of each case that count")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="'tiny' also shortens what is asked for")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    given = parser.parse_args(words)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[given.shape]
    lengths = dict.fromkeys(max(1, tokens // shape.shorter) for tokens in given.prompt_tokens)
    cases = [Case(*sizes) for sizes in product(given.decodes, lengths, (0, SIX))]
    context = max(1, CONTEXT // shape.shorter)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    facts = {
        "machine": f"{name}, torch {torch.__version__}",
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/mixed_steps.py", *words]),
        "shape": shape.name,
        "what": WHAT.format(context=context, steps=given.steps),
    }
    figures = Figures(cases, facts, given.output)
    with tempfile.TemporaryDirectory() as scratch:
        measure_all(Path(scratch), shape, context, given.steps, figures)
    print(figures.report(max(given.decodes)))


def measure_all(folder: Path, shape: Shape, context: int, steps: int, figures: Figures) -> None:
    cases = list(figures.of_case)
    most_decodes = max(case.decodes for case in cases)
    longest = max(context + steps + UNCOUNTED + 1, *(case.prompt_tokens for case in cases))
    # A prompt needs a row beside those that decode; sixteen, since an odd number is kernels of its own to compile.
    rows = most_decodes + 16
    author = Author(rows, context, pages_for(longest), shape.config["vocab_size"])
    engine = start(folder, shape, rows, rows * author.pages)
    for plan in author.contexts(most_decodes):
        engine.collect(engine.submit(plan))
    compare(engine, author, steps, figures, has_gpu=torch.cuda.is_available())


def compare(engine: Engine, author: Author, steps: int, figures: Figures, has_gpu: bool) -> None:
    """One engine, first without graphs and then with them."""
    for case in figures.of_case:
        figures.note(case, KERNELS, *measure(engine, author, case, steps))
    if not has_gpu:
        print("No GPU here: steps as graphs are left out.", flush=True)
        return
    engine.capture(PromptRoom(BUDGET), quiet=True)
    while engine.work_while_idle():
        pass
    for case in figures.of_case:
        if fits_a_frame(author.step(case, 0), author.rows):
            figures.note(case, GRAPH, *measure(engine, author, case, steps))
        else:
            print(f"{case}: fits into no frame, so it is never a graph.", flush=True)


def start(folder: Path, shape: Shape, rows: int, kv_blocks: int) -> Engine:
    """An engine without graphs, six adapters in its slots."""
    begun_at = time.monotonic()
    model = make_model(folder / "model", shape.config)
    make_adapter(folder / "adapter", model, RANK, "cuda" if torch.cuda.is_available() else "cpu")
    engine = build_engine(
        EngineConfig(
            model=ModelConfig(model_path=str(model), load_format="dummy", enable_cuda_graphs=False),
            cache=CacheConfig(kv_blocks=kv_blocks),
            scheduler=SchedulerConfig(max_running_requests=rows),
            lora=LoraConfig(max_loras_per_batch=SIX, max_lora_rank=RANK),
            quiet=True,
        )
    )
    fill_slots(engine, folder / "adapter")
    print(f"started after {time.monotonic() - begun_at:.1f} s", flush=True)
    return engine


def fill_slots(engine: Engine, path: Path) -> None:
    """Six adapters of one folder, numbered from 1, each in a slot; waits until all are there."""
    told: SimpleQueue[Message] = SimpleQueue()
    engine.listen(told.put)
    adapters = tuple(Adapter(adapter_id=AdapterId(n), name=f"a{n}", path=str(path)) for n in range(1, SIX + 1))
    loads = tuple(Load(adapter_id=adapter.adapter_id, slot=Slot(slot)) for slot, adapter in enumerate(adapters))
    engine.collect(engine.submit(StepPlan(step_id=0, fetches=adapters, loads=loads)))
    ready = 0
    while ready < SIX:
        message = told.get(timeout=60.0)
        if isinstance(message, AdapterFailed):
            sys.exit(f"An adapter could not be loaded: {message.reason}")
        ready += isinstance(message, AdapterReady)


if __name__ == "__main__":
    main()
