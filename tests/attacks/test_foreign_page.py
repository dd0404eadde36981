"""Attack 11: a page of another site, in a real browser, sends orders to a server without keys in its network."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.attacks.live import neighbour, serving
from tests.dashboard.conftest import browser

__all__ = ["browser"]

# As any page may, without asking the server first; a page learns nothing of the answer.
ORDER = """([url, route]) => fetch(url + route,
    {method: "POST", mode: "no-cors", body: JSON.stringify({lora_name: "pirate"})}).then(() => true)"""
ASK = """async (url) => {
    const body = JSON.stringify({prompt: "Hi", max_tokens: 4, stream: true});
    const headers = {"Content-Type": "application/json", "Authorization": "Bearer none"};
    const answer = await fetch(url + "/v1/completions", {method: "POST", headers, body});
    return [answer.status, answer.headers.get("x-request-id"), await answer.text()];
}"""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>A page</title>")

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


@contextmanager
def site() -> Iterator[str]:
    """The origin of a site with one page."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def own_address() -> str:
    """An address of this machine that others reach: to such a one browsers say less than to the machine itself."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("192.0.2.1", 9))  # nothing is sent
        if not (found := asked.getsockname()[0]).startswith("127."):
            return str(found)
    pytest.skip("this machine has no address but its own")


@pytest.mark.long("a whole server starts, and a browser; tests/server/test_origins.py has every case without them")
def test_a_strangers_page_changes_nothing_and_one_that_is_allowed_reads_streams(tmp_path, browser, record_property):
    address = own_address()
    with ExitStack() as stack:
        evil, chat = stack.enter_context(site()), stack.enter_context(site())
        flags = ("--allow-anyone", "--host", "0.0.0.0", "--allowed-origins", chat)
        server = stack.enter_context(serving(tmp_path, *flags, keys=""))
        url = f"http://{address}:{server.url.rpartition(':')[2]}"
        pages = {origin: stack.enter_context(browser.new_page()) for origin in (evil, chat)}
        with neighbour(server) as gaps:
            for origin, page in pages.items():
                page.goto(origin)
                if origin == evil:
                    for route in ("/v1/unload_lora_adapter", "/unload_lora_adapter", "/flush_cache"):
                        assert page.evaluate(ORDER, [url, route]), "the browser has sent it"
                    with pytest.raises(Exception, match="Failed to fetch"):
                        page.evaluate(ASK, url)
                else:
                    status, name, text = page.evaluate(ASK, url)
            after = server.birds.ask("pirate")
        record_property("gaps", str(gaps))

        assert after.status_code == 200, after.text
        assert (status, bool(name), text.rstrip().endswith("data: [DONE]")) == (200, True, True)
        assert not gaps.problems
