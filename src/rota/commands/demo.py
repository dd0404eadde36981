"""`rota demo` serves more adapters than there are slots and sends requests for all of them."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rota.commands.flags import config_file, make_command, quiet_flag, with_file
from rota.commands.serve import chosen_engine, model_argument, serve_model
from rota.commands.server_call import CallError, ask
from rota.core.config import ServerConfig
from rota.core.errors import ConfigError
from rota.core.options import build, option, options_of, refuse_unless
from rota.engine.folders.builtin import CALLER, MODEL_NAME
from rota.llm.config import ENGINE_CONFIGS
from rota.workload.arrivals import Arrival, asks
from rota.workload.scenario import Client

PROMPTS = (
    "Tell me about the sea.",
    "What should I cook tonight?",
    "Explain why the sky is blue.",
    "Give me three ideas for a rainy day.",
    "How does a bicycle stay upright?",
    "Describe a small town in winter.",
)
TIMEOUT_S = 120.0
# Most open requests. A slow machine then gets fewer requests a second, and its queue does not grow.
MOST_OPEN = 16


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Where the demo listens, and how much traffic it sends."""

    port: int = option(30000, "Port to listen on; 0 picks a free one.")
    rate: float = option(3.0, "Requests per second.")
    browser: bool = option(True, "Open the dashboard in a browser.")
    slots: int = option(
        3,
        "Adapters on the device at a time, unless max_loras_per_batch is given. Six are built in, so they take turns.",
    )

    def __post_init__(self) -> None:
        refuse_unless(lambda value: 0.0 < value <= 1000.0, "lie above 0 and at most 1000", self, "rate")


DEMO_CONFIGS = (DemoConfig, *ENGINE_CONFIGS)


def demo_command(serve: Callable[..., None] = serve_model, followers: Collection[str] = ()) -> Callable[..., None]:
    """`followers`: see `serve_command`."""

    def act(given: dict[str, Any]) -> None:
        chosen = with_file(given, *DEMO_CONFIGS)
        demo = build(DemoConfig, chosen)
        slots = chosen.setdefault("max_loras_per_batch", demo.slots)
        if "slots" in chosen and slots != demo.slots:
            raise ConfigError(
                f"slots is {demo.slots} and max_loras_per_batch {slots}, but they are the same thing; give one of them."
            )
        config = chosen_engine(chosen, followers)
        traffic = DemoTraffic(demo.rate)

        def begin(url: str) -> None:
            page = f"{url}/dashboard"
            print(f"Watch it at {page} (ctrl-C ends the demo).", flush=True)
            if demo.browser:
                webbrowser.open(page)
            traffic.start(url)

        print(f"Starting {MODEL_NAME if config.model.model_path is None else config.model.model_path}.", flush=True)
        try:
            serve(config, ServerConfig(port=demo.port, log_level="warning", drain_timeout=0.0), begin)
        finally:
            traffic.stop()

    return make_command(
        act,
        "Watch adapters share slots: the six adapters of the built-in model on three slots, or the adapters of MODEL. "
        "Serves the model on this machine alone, sends mixed traffic and opens the dashboard. ctrl-C ends it.",
        options_of(*DEMO_CONFIGS).values(),
        model_argument(),
        config_file(),
        quiet_flag(),
    )


class DemoTraffic:
    """Sends requests for every model of the server at random moments until it is stopped, in its own threads."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._stopped = threading.Event()
        self._free_places = threading.Semaphore(MOST_OPEN)
        self._pool = ThreadPoolExecutor(MOST_OPEN + 1, thread_name_prefix="rota-demo")

    def start(self, url: str) -> None:
        """Returns at once."""
        self._pool.submit(self._run, url)

    def stop(self) -> None:
        """Call it when the server has ended: then no request is open."""
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def _run(self, url: str) -> None:
        names = _shown([model["id"] for model in ask(url, None, "/v1/models", timeout_s=TIMEOUT_S)["data"]])
        client = Client(
            requests=1_000_000,
            rate_per_s=self._rate,
            output_tokens=(8, 64),
            adapters=len(names) - 1,
            distribution="zipf",
            zipf_exponent=0.5,
            base_share=0.15,
        )
        before = 0.0
        for arrival in asks(client, seed=0):
            # Wait for pauses, not instants: after a delay there must be no burst.
            if self._stopped.wait(arrival.at - before):
                return
            before = arrival.at
            self._free_places.acquire()
            if not self._stopped.is_set():
                self._pool.submit(self._ask, url, names[arrival.adapter_id], arrival)

    def _ask(self, url: str, model: str, arrival: Arrival) -> None:
        prompt = PROMPTS[arrival.number % len(PROMPTS)]
        body = {"model": model, "prompt": prompt, "max_tokens": arrival.output_tokens, "ignore_eos": True}
        try:
            ask(url, None, "/v1/completions", body, TIMEOUT_S)
        except CallError:
            pass  # the server stops, or the adapter was unloaded; the dashboard shows it
        finally:
            self._free_places.release()


def _shown(names: list[str]) -> list[str]:
    """The base model first: its id is 0. Of the built-in adapters those that have a style."""
    return [name for name in names if (names[0], name) != (MODEL_NAME, CALLER)]
