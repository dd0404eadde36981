"""Measures what tensor parallel adds to a pass of the leader: encoding a plan once and sending it to all followers.

The plans are those of a scheduler with 64 requests at work, 200 tokens of prompt and 100 of answer each. The followers
are processes that decode every plan and check its number.

python benchmarks/plan_sending.py [--followers 1 2 4 8] [--output FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator

import zmq

from rota.core.capacity import Capacity
from rota.core.config import EngineConfig, ModelConfig, SchedulerConfig
from rota.core.ids import RequestId
from rota.core.messages import Submit
from rota.core.plan import StepPlan, StepResult
from rota.core.request import Request, SamplingParams
from rota.llm.config import build_device
from rota.runtime.lifeline import die_with
from rota.runtime.ranks.follower import arrive
from rota.runtime.ranks.meeting import CODEC, Meeting, Numbered, open_line
from rota.runtime.ranks.processes import FollowerJob
from rota.scheduler import Scheduler

AT_WORK, PROMPT, ANSWER = 64, 200, 100
PLANS = 2000
STEP_S = 0.008  # between two plans, as on a GPU: the sockets are idle before each


def plans() -> Iterator[StepPlan]:
    """A request that ends makes room for the next at once."""
    capacity = Capacity(blocks=AT_WORK * 40, block_size=16, rows=AT_WORK, max_sequence_tokens=8192)
    scheduler = Scheduler(SchedulerConfig(), capacity)
    # They differ in length, or all would end in one step.
    for number in range(AT_WORK * PLANS // ANSWER):
        sampling = SamplingParams(max_new_tokens=ANSWER // 2 + number * 37 % ANSWER, stop_token_ids=frozenset({2}))
        prompt = tuple((number * 31 + i) % 50_000 for i in range(PROMPT))
        name = RequestId(f"cmpl-{number:032x}")
        scheduler.apply(Submit(Request(request_id=name, prompt=prompt, sampling=sampling, arrived_at=0.0)))
    for step in range(PLANS):
        plan = scheduler.plan(step * STEP_S)
        yield plan
        scheduler.commit(plan, StepResult(at=step * STEP_S, tokens=(7,) * len(plan.sampled_rows)))


def config_of(followers: int, rank: int) -> EngineConfig:
    return EngineConfig(model=ModelConfig(tensor_parallel_size=followers + 1), rank=rank)


def follow(address: str, followers: int, rank: int) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    die_with(parent.pid)
    line = open_line(zmq.Context(), zmq.DEALER)
    line.connect(address)
    arrive(line, FollowerJob(make_device=build_device, config=config_of(followers, rank), address=address))
    number = 0
    while isinstance(record := CODEC.decode(line.recv())[0], Numbered):
        number += 1
        assert record.number == number


def measure(followers: int) -> dict[str, list[float]]:
    """Seconds by the clock, for plans in which a request starts and for plans in which none does."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    meeting = Meeting(context, followers + 1, "tcp://127.0.0.1:*")
    start = multiprocessing.get_context("spawn").Process
    processes = [start(target=follow, args=(meeting.address, followers, rank + 1)) for rank in range(followers)]
    for process in processes:
        process.start()
    meeting.gather(lambda: "", 60.0)
    meeting.welcome("", "")
    taken: dict[str, list[float]] = {"decodes alone": [], "with newcomers": []}
    for plan in plans():
        started_at = time.perf_counter()
        meeting.send_plan(plan)
        taken["with newcomers" if plan.seats else "decodes alone"].append(time.perf_counter() - started_at)
        time.sleep(STEP_S)
    meeting.dismiss()
    for process in processes:
        process.join(10.0)
        assert process.exitcode == 0, "a follower missed a plan"
    meeting.close()
    context.term()
    return taken


def sizes() -> dict[str, list[int]]:
    """Bytes, likewise."""
    found: dict[str, list[int]] = {"decodes alone": [], "with newcomers": []}
    for number, plan in enumerate(plans(), 1):
        packet = CODEC.encode([Numbered(number, plan)])
        found["with newcomers" if plan.seats else "decodes alone"].append(len(packet))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--followers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--output", help="write the numbers as JSON")
    options = parser.parse_args()
    results = {
        f"{kind}, bytes": {"plans": len(found), "mean": round(statistics.mean(found), 1)}
        for kind, found in sizes().items()
    }
    gc.freeze()
    for followers in options.followers:
        for kind, taken in measure(followers).items():
            results[f"{kind}, µs, {followers} followers"] = {
                "median": round(statistics.median(taken) * 1e6, 1),
                "p99": round(statistics.quantiles(taken, n=100)[98] * 1e6, 1),
            }
    for name, numbers in results.items():
        print(f"{name:32}", "   ".join(f"{word} {number:7.1f}" for word, number in numbers.items()))
    if options.output:
        with open(options.output, "w") as file:
            json.dump(results, file, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    main()
