"""Takes the pictures of the dashboard in docs/images: the demo in light, dark and on a phone, and a replay.

python benchmarks/dashboard_pictures.py     needs a Chromium, about two minutes and a machine that is not too busy
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from rota.runtime.lifeline import tied

ROTA = Path(sys.executable).with_name("rota")
ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
LAPTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
TRAFFIC_MS = 75_000  # until the strip and the charts are full


def main() -> None:
    chromium = shutil.which("chromium") or sys.exit("There is no chromium on this machine.")
    demo = subprocess.Popen(tied([ROTA, "demo", "--no-browser", "--port", "0"]), stdout=subprocess.PIPE, text=True)
    try:
        assert demo.stdout is not None
        page = next(line.split()[3] for line in demo.stdout if line.startswith("Watch it at "))
        with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
            browser = playwright.chromium.launch(
                executable_path=chromium, args=["--headless", "--no-sandbox", "--disable-gpu"]
            )
            take_live(browser, page)
            take_replay(browser, page, simulate(Path(folder) / "tail-ttft.jsonl"))
    finally:
        demo.send_signal(signal.SIGINT)
        demo.wait()


def take_live(browser: Browser, url: str) -> None:
    with browser.new_page(viewport=LAPTOP, device_scale_factor=1.5, color_scheme="light") as page:
        page.goto(url)
        page.get_by_text("live", exact=True).wait_for()
        page.wait_for_timeout(TRAFFIC_MS)
        page.screenshot(path=IMAGES / "dashboard-light.png", full_page=True)
        page.emulate_media(color_scheme="dark")
        page.get_by_role("button", name="30 s").click()
        page.mouse.move(0, 0)
        page.wait_for_timeout(600)
        page.screenshot(path=IMAGES / "dashboard-dark.png", full_page=True)
    with browser.new_page(viewport=PHONE, device_scale_factor=2, color_scheme="light") as page:
        page.goto(url)
        page.get_by_text("live", exact=True).wait_for()
        page.get_by_role("button", name="10 s").click()
        page.wait_for_timeout(2000)
        page.screenshot(path=IMAGES / "dashboard-phone.png")


def take_replay(browser: Browser, url: str, journal: Path) -> None:
    with browser.new_page(viewport=LAPTOP, device_scale_factor=1.5, color_scheme="light") as page:
        page.goto(url)
        page.get_by_text("live", exact=True).wait_for()
        page.locator("#file").set_input_files(journal)
        page.locator("#scrub").fill("620")
        page.get_by_role("button", name="10 s").click()
        page.wait_for_timeout(400)
        page.get_by_role("button", name="Pause").click()
        page.mouse.move(0, 0)
        page.wait_for_timeout(400)
        page.screenshot(path=IMAGES / "dashboard-replay.png")


def simulate(journal: Path) -> Path:
    """The tail of first tokens under `drain`, so that drains are seen."""
    policy = ["--lora-policy", "drain", "--lora-drain-wait-threshold", "2"]
    scenario = ROOT / "benchmarks" / "scenarios" / "tail-ttft.toml"
    subprocess.run(tied([ROTA, "simulate", scenario, *policy, "--journal", journal, "--quiet"]), check=True)
    return journal


if __name__ == "__main__":
    main()
