"""The web page in a real browser, without a window; skipped where none is installed."""

from __future__ import annotations

import base64
import io
import re
import shutil
from collections.abc import Iterator

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from server_process import RunningServer, eventually, running

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
expect.set_options(timeout=60_000)  # a busy machine is no failure
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here; Debian has it as: apt-get install chromium"
)


@pytest.fixture(scope="module")
def server(make_slow_recipe, tmp_path_factory) -> Iterator[RunningServer]:
    jobs = tmp_path_factory.mktemp("server") / "jobs.sqlite3"
    with running(make_slow_recipe(), jobs, "--max-images", "128") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    """The page, freshly opened; what it asks of another place, or what fails in it, fails the test."""
    problems: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and problems.append(message.text))
    page.on(
        "request",
        lambda request: (
            request.url.startswith((server.url, "data:", "blob:")) or problems.append(f"asks {request.url}")
        ),
    )
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text("h3-mini")
    expect(page.locator("#gallery")).to_have_attribute("aria-busy", "false")
    yield page
    page.close()
    assert not problems


def picture(color: str, size: tuple[int, int] = (128, 96)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


def drop(page: Page, *files: bytes) -> None:
    """Drops files on the page as a file manager would."""
    texts = [base64.b64encode(data).decode() for data in files]
    transfer = page.evaluate_handle(
        """texts => {
            const transfer = new DataTransfer();
            texts.forEach((text, k) => {
                const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
                transfer.items.add(new File([bytes], `${k}.png`, { type: "image/png" }));
            });
            return transfer;
        }""",
        texts,
    )
    page.dispatch_event("#drop", "dragenter", {"dataTransfer": transfer})
    expect(page.locator("#veil")).to_be_visible()
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})
    expect(page.locator("#veil")).to_be_hidden()


def draw(page: Page, prompt: str) -> None:
    page.fill("#prompt", prompt)
    page.press("#prompt", "Control+Enter")
    expect(page.locator("#go")).to_be_enabled(timeout=120_000)
    expect(page.locator("#result-actions")).to_be_visible()


def test_a_prompt_becomes_a_picture_with_its_seed_and_a_place_in_the_gallery(page, server):
    before = page.locator("#gallery button").count()
    page.fill("#seed", "7")
    draw(page, "a red apple")
    expect(page.locator("#status")).to_have_text(re.compile(r"^96 × 64, seed 7, [\d.]+ s$"))
    expect(page.locator("#gallery button")).to_have_count(before + 1)
    shown = page.locator("#picture").get_attribute("src")
    assert server.get(shown).body == base64.b64decode(server.draw(seed=7).json["data"][0]["b64_json"])


DRAWING = """() => {
    const shown = (name) => document.querySelector(name)?.checkVisibility();
    const counts = /^Step \\d+ of 768$/.test(document.querySelector("#status").textContent);
    return counts && shown("#progress") && shown("#canvas.drawing img");
}"""  # all at once: the drawing goes on between two questions


def test_steps_and_previews_are_shown_while_it_draws_and_stop_stops(page):
    page.fill("#count", "128")
    page.select_option("#shape", "custom")
    page.fill("#width", "512")
    page.fill("#height", "512")
    page.fill("#prompt", "a red apple")
    page.click("#go")
    page.wait_for_function(DRAWING, timeout=120_000)
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.", timeout=120_000)
    expect(page.locator("#go")).to_be_enabled()


def test_dropped_pictures_are_references_in_their_order_up_to_the_models_limit(page):
    drop(page, picture("red"), picture("blue"))
    expect(page.locator("#references img")).to_have_count(2)
    page.click("#references li:first-child button")
    expect(page.locator("#references img")).to_have_count(1)
    draw(page, "make it blue")
    expect(page.locator("#status")).to_have_text(re.compile("^128 × 96"))
    drop(page, picture("red"), picture("red"), picture("red"))
    expect(page.locator("#references img")).to_have_count(3)
    expect(page.locator("#message")).to_have_text("This model takes at most 3 references.")


def test_a_result_is_the_next_ones_reference(page):
    draw(page, "a red apple")
    page.click("#use-result")
    expect(page.locator("#references img")).to_have_count(1)
    expect(page.locator("#prompt")).to_be_focused()


def test_the_gallery_and_the_viewer_work_by_keyboard_alone(page):
    for seed in ("11", "12"):
        page.fill("#seed", seed)
        draw(page, f"a green apple on the {seed}")
    tiles = page.locator("#gallery button")
    tiles.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tiles.nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#viewer")).to_be_visible()
    expect(page.locator("#viewer-prompt")).to_have_text("a green apple on the 11")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#viewer-prompt")).to_have_text("a green apple on the 12")
    facts = page.locator("#viewer-facts").inner_text()
    assert "96 × 64" in facts
    assert "denoise" in facts
    with page.expect_download() as download:
        page.keyboard.press("d")
    assert download.value.suggested_filename == "a-green-apple-on-the-12-12.png"
    page.keyboard.press("Escape")
    expect(page.locator("#viewer")).to_be_hidden()


def test_a_slow_gallery_has_the_picture_before_the_form_is_free_and_keeps_the_focus(page):
    draw(page, "a pear")
    tiles = page.locator("#gallery button")
    tiles.first.focus()

    def answer_late(route):
        page.wait_for_timeout(1_000)
        route.continue_()

    page.route("**/v1/jobs?limit=60", answer_late)
    page.evaluate("document.querySelector('#prompt').value = 'a plum'")
    page.evaluate("document.querySelector('#composer').requestSubmit()")
    expect(page.locator("#go")).to_be_disabled()
    expect(page.locator("#go")).to_be_enabled(timeout=120_000)
    assert tiles.first.get_attribute("aria-label") == "Open: a plum"
    assert tiles.nth(1).evaluate("tile => tile === document.activeElement && tile.tabIndex === 0")
    page.unroute_all(behavior="wait")


def test_a_stop_that_comes_before_the_server_has_the_job_stops_it(page, server):
    page.fill("#count", "128")
    page.select_option("#shape", "custom")
    page.fill("#width", "512")
    page.fill("#height", "512")
    page.fill("#prompt", "a red apple on the blue")
    held = []
    page.route("**/v1/jobs", lambda route: held.append(route))
    page.click("#go")
    eventually(lambda: page.wait_for_timeout(10) or held, "the page has asked")
    page.click("#stop")
    held[0].continue_()
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("#go")).to_be_enabled()
    (newest,) = server.get("/v1/jobs?limit=1").json["data"]
    assert (newest["request"]["prompt"], newest["status"]) == ("a red apple on the blue", "cancelled")


def test_a_gallery_that_comes_late_does_not_bring_back_what_was_forgotten(page):
    draw(page, "a pear")
    tiles, held = page.locator("#gallery button"), []
    count = tiles.count()

    def hold_the_first(route):
        if held:
            route.continue_()
        else:
            held.append((route, route.fetch()))

    page.route("**/v1/jobs?limit=60", hold_the_first)
    page.fill("#prompt", "a plum")
    page.click("#go")
    eventually(lambda: page.wait_for_timeout(10) or held, "the plum is drawn")
    tiles.first.click()
    expect(page.locator("#viewer-prompt")).to_have_text("a pear")
    page.click("#viewer-forget")
    expect(tiles.first).to_have_attribute("aria-label", "Open: a plum")
    route, early = held[0]
    route.fulfill(response=early)
    expect(page.locator("#go")).to_be_enabled()
    expect(tiles).to_have_count(count)
    assert "Open: a pear" not in [tiles.nth(k).get_attribute("aria-label") for k in range(2)]


def test_pictures_that_are_pasted_at_once_all_become_references_up_to_the_limit(page):
    page.evaluate(
        """async () => {
            const canvas = Object.assign(document.createElement("canvas"), { width: 64, height: 64 });
            const blob = await new Promise((done) => canvas.toBlob(done));
            for (let k = 0; k < 2; k++) {
                const clipboardData = new DataTransfer();
                for (const name of ["a.png", "b.png"]) {
                    clipboardData.items.add(new File([blob], name, { type: blob.type }));
                }
                document.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true }));
            }
        }"""
    )
    expect(page.locator("#message")).to_have_text("This model takes at most 3 references.")
    expect(page.locator("#references img")).to_have_count(3)


def test_same_settings_fill_the_form_and_delete_forgets(page):
    page.fill("#seed", "21")
    page.select_option("#shape", "4:3")
    draw(page, "a blue apple")
    page.locator("#gallery button").first.click()
    page.fill("#prompt", "")
    page.click("#viewer-again")
    expect(page.locator("#prompt")).to_have_value("a blue apple")
    expect(page.locator("#seed")).to_have_value("21")
    expect(page.locator("#shape")).to_have_value("4:3")
    count = page.locator("#gallery button").count()
    page.locator("#gallery button").first.click()
    page.click("#viewer-forget")
    expect(page.locator("#gallery button")).to_have_count(count - 1)


def test_settings_that_the_form_has_no_words_for_become_the_size_that_was_drawn(browser, server):
    """Jobs of other programs are in the gallery too."""
    for wish, shape in (({"aspect_ratio": "5:4"}, "custom"), ({"size": "auto"}, "")):
        job = server.post("/v1/jobs", {"prompt": "a red apple", **wish}).json["id"]
        drawn = eventually(lambda job=job: server.get(f"/v1/jobs/{job}").json["images"], "it is drawn")
        page = browser.new_page()
        page.goto(server.url)
        page.locator("#gallery button").first.click()
        page.click("#viewer-again")
        expect(page.locator("#shape")).to_have_value(shape)
        if shape == "custom":
            width, height = drawn[0]["size"].split("x")
            expect(page.locator("#width")).to_have_value(width)
            expect(page.locator("#height")).to_have_value(height)
        page.close()


def test_what_is_wrong_is_said_beside_the_form(browser, server):
    page = browser.new_page()
    page.goto(server.url)
    page.fill("#prompt", " ")
    page.click("#go")
    expect(page.locator("#message")).to_have_text("Say what to draw first.")
    page.fill("#prompt", "a red apple")
    page.fill("#seed", "seven")
    page.click("#go")
    expect(page.locator("#message")).to_have_text("Seed: a whole number of at most 15 digits.")
    page.fill("#seed", "")
    page.select_option("#shape", "custom")
    page.fill("#width", "100000")
    page.fill("#height", "10000")
    page.click("#go")
    expect(page.locator("#message")).to_have_text(re.compile("size=100000x10000.*The nearest is"))
    page.close()


def test_what_comes_to_no_end_is_said(browser, server):
    """A server that stops ends the events of a job without its end; a picture may expire on the stage."""
    page = browser.new_page()
    page.goto(server.url)
    draw(page, "a red apple")
    page.route("**/v1/pictures/**", lambda route: route.fulfill(status=404, body=""))
    page.click("#use-result")
    expect(page.locator("#message")).to_have_text("The picture has expired.")
    waits = 'event: queued\ndata: {"position": 1}\n\n'
    page.route("**/events", lambda route: route.fulfill(content_type="text/event-stream", body=waits))
    page.click("#go")
    expect(page.locator("#message")).to_have_text(
        "The server has stopped. What waited goes on when it is back."
    )
    expect(page.locator("#go")).to_be_enabled()
    page.close()


def test_it_is_light_and_dark_and_remembers(page):
    def background() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page.emulate_media(color_scheme="dark")
    dark = background()
    page.emulate_media(color_scheme="light")
    assert background() != dark
    page.click("#theme")
    assert background() == dark
    page.reload()
    assert background() == dark


def test_a_prompt_is_text_and_never_markup(page):
    draw(page, "<img src=x onerror=alert(1)> apple")
    page.locator("#gallery button").first.click()
    expect(page.locator("#viewer-prompt")).to_have_text("<img src=x onerror=alert(1)> apple")
    assert page.locator("#viewer-prompt img").count() == 0


def test_a_server_with_keys_asks_for_one(browser, tiny_recipe, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a-key-that-nobody-guesses\n")
    with running(tiny_recipe, tmp_path / "jobs.sqlite3", "--api-key-file", str(keys), wait=False) as server:
        page = browser.new_page()
        page.goto(server.url)
        expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key", "a-key-that-nobody-guesses")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("h3-mini")
        expect(page.locator("#key-dialog")).to_be_hidden()
        page.close()


def test_the_page_of_calls_lists_them(browser, server):
    paths = server.get("/openapi.json").json["paths"]
    page = browser.new_page()
    page.goto(f"{server.url}/docs")
    expect(page.locator("article")).to_have_count(sum(len(verbs) for verbs in paths.values()))
    expect(page.locator("article").first).to_contain_text("/v1/images/generations")
    page.close()
