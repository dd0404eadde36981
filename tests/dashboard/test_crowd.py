"""The page with five hundred adapters, without an engine, and without a mouse."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect

from rota.dashboard import feed as feed_module
from rota.server.access.keys import Key
from tests.dashboard.looking import WAIT_MS, findings, wait_for_text
from tests.dashboard.stage import Stage, breaks_at_forty, roomy
from tests.runtime.services import LONG

pytestmark = pytest.mark.long("a browser draws five hundred adapters; test_page.py has the page with few")

CROWD = tuple(
    f"team-{number % 17:02d}/{'support' if number % 3 else 'answers-to-invoices-and-reminders'}-{number:03d}"
    for number in range(500)
)


@pytest.fixture
def crowd(on_stage, open_page) -> tuple[Stage, Any]:
    """Five hundred adapters on eight slots; the first three have requests."""
    made = on_stage(names=CROWD, room=roomy(slots=8), step_s=0.02)
    page = open_page(f"{made.url}/dashboard")
    wait_for_text(page, "#status", "live")
    for number, name in enumerate(CROWD[:3]):
        for _ in range(number + 1):
            made.ask(name, LONG)
    wait_for_text(page, '[data-adapter="3"] td.running', "3")
    return made, page


def names_shown(page: Any) -> list[str]:
    return page.locator("#adapters tbody .name b").all_inner_texts()


def test_idle_adapters_are_folded_into_one_line_and_no_name_is_cut(crowd):
    _, page = crowd
    assert names_shown(page) == ["letters", *CROWD[:3]]
    wait_for_text(page, "#adapters-note", "^500 and the base model · 3 with requests$")
    page.get_by_role("button", name="Show 497 idle adapters").click()
    expect(page.locator("#adapters tbody tr")).to_have_count(501, timeout=WAIT_MS)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        # What does not fit is wider than its cell, or hidden by it.
        cells = "[...document.querySelectorAll('#adapters td.name')]"
        assert page.evaluate(f"{cells}.filter((one) => one.scrollWidth > one.clientWidth).length") == 0
        assert page.evaluate(f"{cells}.every((one) => getComputedStyle(one).overflow === 'visible')")
    titles = page.evaluate("[...document.querySelectorAll('.lane b')].map((one) => [one.title, one.textContent])")
    assert {text for _, text in titles} >= {*CROWD[:3]}
    assert all(title == text for title, text in titles)
    page.get_by_role("button", name="Fold 497 idle adapters").click()
    expect(page.locator("#adapters tbody tr")).to_have_count(4, timeout=WAIT_MS)


def test_a_search_finds_idle_adapters_too(crowd):
    _, page = crowd
    page.keyboard.press("/")
    page.keyboard.type("INVOICES-and-reminders-49")
    wait_for_text(page, "#adapters-note", "^3 of 501 match$")
    assert names_shown(page) == [name for name in CROWD if "reminders-49" in name]
    page.get_by_label("Search adapters").fill("no such name")
    wait_for_text(page, "#adapters-note", "^0 of 501 match$")


def test_numbers_are_sorted_as_numbers_and_names_as_names(crowd):
    made, page = crowd
    wait_for_text(page, '[data-adapter="1"] .loads', "^1$")
    assert page.locator("#adapters tbody .rank").all_inner_texts() == ["–", "16", "32", "8"]
    for _ in range(10):
        made.ask(CROWD[0], LONG)
    wait_for_text(page, '[data-adapter="1"] td.running', "11")
    head = page.locator('#adapters th[data-column="running"]')
    head.get_by_role("button").click()
    expect(page.locator("#adapters tbody td.running")).to_have_text(["11", "3", "2", "0"], timeout=WAIT_MS)
    assert head.get_attribute("aria-sort") == "descending"
    head.get_by_role("button").click()
    expect(page.locator("#adapters tbody td.running")).to_have_text(["0", "2", "3", "11"], timeout=WAIT_MS)
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") is None
    assert names_shown(page) == ["letters", *CROWD[:3]]
    page.locator('#adapters th[data-column="name"]').get_by_role("button").click()
    assert names_shown(page) == sorted(["letters", *CROWD[:3]])


def test_an_open_request_says_why_it_waits_and_a_tenant_what_it_may_spend(on_stage, browser):
    keys = {
        "sesame": Key("ann"),
        "secret": Key("bob", may_operate=False, requests_per_minute=3, max_running=1, max_queued=4),
    }
    made = on_stage(keys=keys, step_s=0.02)
    with browser.new_page() as page:  # a refused key is an error on the browser's console
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{made.url}/dashboard")
        page.get_by_label("Key").fill("sesame")
        page.get_by_role("button", name="Watch").click()
        made.ask("letters", LONG, "secret")
        wait_for_text(page, "#requests-table .state", "running")
        for _ in range(3):
            made.ask("letters", LONG, "secret")
        wait_for_text(page, '#tenants [data-key="bob"] .errors', "^1 rate limit exceeded$")
        wait_for_text(
            page,
            '#tenants [data-key="bob"] .limits',
            "3 of 3 requests a minute1 of 1 answers running2 of 4 answers waiting",
        )
        wait_for_text(page, "#requests-note", "^3 open$")
        row = page.locator("#requests-table tbody tr").first
        expect(row.locator(".state")).to_have_text("waiting", timeout=WAIT_MS)
        expect(row.locator(".tenant")).to_have_text("bob")
        expect(row.locator(".why")).to_have_text(re.compile("key run as may run"), timeout=WAIT_MS)
        assert findings(page) == []


@pytest.mark.usefixtures("capsys")
def test_when_the_engine_has_died_its_history_stays_and_what_is_not_known_is_said(on_stage, open_page):
    made = on_stage(next_token=breaks_at_forty)
    page = open_page(f"{made.url}/dashboard")
    made.ask("pirate", 20)
    wait_for_text(page, '[data-figure="First token"] .value', "ms|s")
    wait_for_text(page, '[data-slot="0"] .label', "pirate")
    page.get_by_role("button", name="last hour").click()
    wait_for_text(page, "#span-name", "^the last hour$")
    made.ask("letters", 100)
    wait_for_text(page, "#status", "engine down")
    wait_for_text(page, "#errors .sentence", "a kernel went wrong")
    wait_for_text(page, '[data-figure="KV in use"] .note', "^no engine serves now$")

    assert page.locator(".lane").count() == 2
    wait_for_text(page, '[data-figure="First token"] .value', "ms|s")
    wait_for_text(page, '[data-figure="Output"] .value', "[1-9]|0\\.[1-9]")
    assert findings(page) == []


def test_an_answer_comes_from_two_adapters_side_by_side(on_stage, open_page):
    made = on_stage(step_s=0.02, room=roomy(slots=2))
    page = open_page(f"{made.url}/dashboard")
    wait_for_text(page, "#status", "live")
    page.get_by_role("button", name="Ask haiku").click()
    page.keyboard.type("The sea is")
    page.get_by_label("Another one beside it").fill("json")
    page.get_by_label("Most tokens").fill("200")
    page.get_by_label("without a chat template").check()
    page.keyboard.press("Control+Enter")
    haiku, json = page.get_by_role("article", name="haiku"), page.get_by_role("article", name="json")
    for pane in (haiku, json):
        expect(pane.locator(".answer")).to_have_text(re.compile("[a-z]{3}"), timeout=WAIT_MS)
    assert "tokens/s" not in haiku.inner_text(), "it is shown as it comes"
    for pane in (haiku, json):
        expect(pane).to_contain_text(
            re.compile(r"first token [\d.]+ m?s · 200 tokens · [\d.]+ tokens/s"), timeout=WAIT_MS
        )
    assert findings(page) == []


def test_an_answer_can_be_stopped_and_an_unknown_name_is_refused_with_its_sentence(on_stage, browser):
    made = on_stage(step_s=0.02)
    with browser.new_page() as page:  # the refusal is a 404, which the browser counts as an error of the page
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{made.url}/dashboard")
        wait_for_text(page, "#status", "live")
        page.get_by_label("Prompt").fill("The sea is")
        page.get_by_label("Adapter or base model").fill("nowhere")
        page.get_by_label("Another one beside it").fill("letters")
        page.get_by_label("Most tokens").fill(str(LONG))
        page.get_by_label("without a chat template").check()
        page.locator("#ask-form").get_by_role("button", name="Ask").click()
        expect(page.get_by_role("article", name="nowhere")).to_contain_text(
            "no model or adapter named 'nowhere'", timeout=WAIT_MS
        )
        wait_for_text(page, "#requests-note", "^1 open$")
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("article", name="letters")).to_contain_text("stopped", timeout=WAIT_MS)
        wait_for_text(page, "#requests-note", "^no request is open$")


def test_while_an_answer_waits_the_prompt_box_says_for_what(on_stage, open_page):
    made = on_stage(room=roomy(rows=1))
    page = open_page(f"{made.url}/dashboard")
    wait_for_text(page, "#status", "live")
    made.ask("letters", LONG)
    wait_for_text(page, '[data-adapter="0"] td.running', "1")
    page.get_by_label("Prompt").fill("The sea is")
    page.get_by_label("Adapter or base model").fill("letters")
    page.get_by_label("without a chat template").check()
    page.locator("#ask-form").get_by_role("button", name="Ask").click()
    expect(page.get_by_role("article", name="letters")).to_contain_text(
        "waits: as many requests run as may run", timeout=WAIT_MS
    )


def test_axe_finds_nothing_among_five_hundred_adapters(crowd):
    _, page = crowd
    wait_for_text(page, "#requests-note", "^6 open$")
    page.get_by_label("Search adapters").fill("-00")
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 844})
        assert findings(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_axe_finds_nothing_on_the_page_that_asks_for_a_key(on_stage, browser):
    with browser.new_page() as page:
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{on_stage(keys={'sesame': Key('ann')}).url}/dashboard")
        wait_for_text(page, "#status", "locked")
        assert findings(page) == []


def test_a_lane_and_a_chart_are_read_with_the_arrow_keys(crowd):
    _, page = crowd
    lane = page.get_by_role("slider", name="Slot 1")
    wait_for_text(page, '[data-slot="0"] .state', r"ready [1-9]\S* s")
    lane.focus()
    page.keyboard.press("End")
    expect(lane).to_have_attribute("aria-valuetext", re.compile("^team-.* ready for"))
    assert page.locator("#tip").is_visible()
    page.keyboard.press("Home")
    expect(lane).to_have_attribute("aria-valuetext", "nothing")
    page.keyboard.press("End")
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()

    chart = page.get_by_role("slider", name="Open requests")
    chart.focus()
    page.keyboard.press("End")
    expect(chart).to_have_attribute("aria-valuetext", re.compile(r"^now, waiting \d, admitted \d"), timeout=WAIT_MS)


def test_everything_that_can_be_clicked_can_be_reached_with_the_tabulator(on_stage, open_page):
    page = open_page(f"{on_stage(names=('pirate',)).url}/dashboard")
    wait_for_text(page, "#status", "live")
    expected = page.locator(":is(button, input, select, textarea, [tabindex]):visible").count()
    reached = set()
    for _ in range(expected + 5):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))

    # The chooser of a file is not to be seen, and is reached all the same.
    assert len(reached - {page.evaluate("[...document.querySelectorAll('*')].indexOf(document.body)")}) >= expected


def test_after_an_upgrade_an_open_page_loads_itself_again(on_stage, open_page, monkeypatch):
    page = open_page(f"{on_stage().url}/dashboard")
    wait_for_text(page, "#status", "live")
    with page.expect_navigation():
        monkeypatch.setattr(feed_module, "__version__", "999.0.0")
    wait_for_text(page, "#status", "live")


def test_replicas_have_a_table_with_their_requests(on_stage, open_page):
    made = on_stage(replicas=2, step_s=0.02)
    page = open_page(f"{made.url}/dashboard")
    for _ in range(4):
        made.ask("letters", LONG)
    wait_for_text(page, "#replicas-note", "^2 of 2 serve$")
    for replica in (0, 1):
        wait_for_text(page, f'#replicas [data-key="{replica}"] td.running', "^2$")
        wait_for_text(page, f'#replicas [data-key="{replica}"] .kv', "%")
        wait_for_text(page, f'#replicas [data-key="{replica}"] .rate', "[1-9]")
    assert findings(page) == []
