"""The page of the HTTP port in a real browser: the distribution's Chromium without a window, driven
by its driver. Skipped where either, or python3-selenium, is missing.

PAGE_PICTURES=DIR also writes pictures of the page there, at three widths in light and dark colours,
to be looked at."""
import hashlib
import http.client
import json
import os
import shutil
import signal
import sys
import time

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
from harness import PATIENT, SLOW, Cluster, nap  # noqa: E402

webdriver = pytest.importorskip("selenium.webdriver", reason="python3-selenium is not installed")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER),
                                reason="chromium or chromedriver is not installed")
PATIENCE_S = 60 * SLOW
PICTURES = os.environ.get("PAGE_PICTURES", "")


def start_browser(width=1200, dark=False):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for a in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
              f"--window-size={width},1600"):
        options.add_argument(a)
    if dark:
        options.add_argument("--force-dark-mode")
        options.add_argument("--blink-settings=preferredColorScheme=0")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


@pytest.fixture(name="browser", scope="module")
def a_browser():
    b = start_browser()
    yield b
    b.quit()


class Page:
    def __init__(self, browser, port):
        self.b, self.at = browser, f"http://127.0.0.1:{port}/"
        browser.get(self.at)
        browser.execute_script("sessionStorage.clear()")
        browser.get("about:blank")  # what the page saves as it leaves is of the page before
        browser.get(self.at)
        browser.execute_script("sessionStorage.clear()")

    def __getitem__(self, name):
        return self.b.find_element(By.ID, name)

    def until(self, condition, what):
        begin = time.monotonic()
        while not (got := condition()):
            assert time.monotonic() < begin + PATIENCE_S, f"{what}: {self.b.page_source[-3000:]}"
            nap(begin)
        return got

    def set(self, **values):
        self.b.execute_script("document.getElementById('settings').open = true")
        for name, value in values.items():
            if name in ("kind", "model"):
                Select(self[name]).select_by_value(value)
            else:
                self[name].clear()
                self[name].send_keys(str(value))

    def ask(self, text):
        self["prompt"].send_keys(text)
        self["send"].click()

    def answers(self):
        return [
            e.get_property("textContent")
            for e in self.b.find_elements(By.CSS_SELECTOR, "#talk li.assistant .tokens")
        ]

    def is_idle(self):
        return self["send"].is_enabled()

    def wait_idle(self):
        self.until(self.is_idle, "the answer does not end")

    def problems(self):
        """What the browser complained of: the policy's refusals, scripts' errors."""
        return [
            x["message"] for x in self.b.get_log("browser") if "favicon" not in x["message"]
            and "status of" not in x["message"] and "net::ERR" not in x["message"]
        ]


def http_port(c):
    return int(c.router.wait_log(r"ev=http_ready .*port=(\d+)").group(1))


def complete(port, **body):
    """The text that any client gets."""
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    c.request("POST", "/v1/completions", json.dumps(body))
    r = json.loads(c.getresponse().read())
    c.close()
    return r["choices"][0]["text"]


def a_cluster(*args, **kwargs):
    return Cluster(router_args=["--http-listen", "127.0.0.1:0", *args], **{**PATIENT, **kwargs})


LONG = dict(kind="completion", max_tokens=400, temperature=0, seed=7)
LONG_BODY = dict(prompt="Once upon a time", max_tokens=400, temperature=0, seed=7)


def test_streaming_and_error(browser):
    with a_cluster() as c:
        port = http_port(c)
        p = Page(browser, port)
        p.until(lambda: p["model"].get_property("value"), "no models")
        p.set(kind="completion", max_tokens=20, temperature=0, seed=7, alternatives=3)
        p.ask("Once upon a time")
        p.wait_idle()
        want = complete(port, prompt="Once upon a time", max_tokens=20, temperature=0, seed=7)
        assert p.answers() == [want]
        spans = browser.find_elements(By.CSS_SELECTOR, "#talk li.assistant .tokens span")
        assert len(spans) == 20
        # tokens and their alternatives, by the mouse and by the keyboard
        webdriver.ActionChains(browser).move_to_element(spans[3]).perform()
        rows = p.until(lambda: browser.find_elements(By.CSS_SELECTOR, "#token-rows tr"), "no rows")
        assert len(rows) in (3, 4) and "%" in rows[0].text and "(taken)" in p["token-rows"].text
        body = browser.find_element(By.CSS_SELECTOR, "#talk li.assistant .tokens")
        body.send_keys(Keys.HOME)
        first = p["token-text"].text
        body.send_keys(Keys.ARROW_RIGHT)
        assert p["token-text"].text != first
        assert want.split()[0] in p["spoken"].get_property("textContent")
        assert "first token" in p["timing"].text and p["request"].is_displayed()
        # the ledger: each stage is in the bar, in the list, and in what a screen reader says
        stages = ("router queue", "room on decode", "prefill queue", "prefill", "calls",
                  "KV not hidden", "decode queue", "decode steps")
        assert "The ledger: TTFT" in p["path-text"].text and "KV:" in p["path-text"].text
        assert len(browser.find_elements(By.CSS_SELECTOR, "#request-bar i")) == len(stages)
        for where in (p["request-legend"].text, p["request-bar"].get_attribute("aria-label")):
            assert [where.find(x) for x in stages] == sorted(where.find(x) for x in stages)
            assert where.find(stages[0]) >= 0
        # chat: two turns, and text that looks like HTML is text
        p["reset"].click()
        p.set(kind="chat")
        p.ask("<img src=x onerror=alert(1)> & <b>bold</b>")
        p.wait_idle()
        user = browser.find_element(By.CSS_SELECTOR, "#talk li.user .tokens")
        assert user.text == "<img src=x onerror=alert(1)> & <b>bold</b>"
        assert not browser.find_elements(By.CSS_SELECTOR, "#talk img, #talk b")
        # an error: told as the server told it, and the text is there to send again
        p["reset"].click()
        p.set(max_tokens=100000)
        p.ask("Too long")
        p.until(lambda: p["problem"].is_displayed(), "no error is told")
        assert "max_tokens" in p["problem"].text
        assert p["prompt"].get_property("value") == "Too long" and not p.answers()
        assert not p.problems()


@pytest.fixture(name="whole", scope="module")
def a_whole_answer():
    with a_cluster() as c:
        return complete(http_port(c), **LONG_BODY)


def in_the_middle(browser, c):
    """A page whose answer has begun, and cannot end: the decode worker is stopped or gone."""
    p = Page(browser, http_port(c))
    p.until(lambda: p["model"].get_property("value"), "no models")
    p.set(**LONG, alternatives=0)
    p.ask("Once upon a time")
    p.until(lambda: p.answers() and len(p.answers()[0]) > 20, "nothing streams")
    assert not p.is_idle()
    return p


def test_stop(browser):
    with a_cluster(envs={"decode-0": {"TANDEM_FAULT": "decode_token:stop:30"}}) as c:
        p = in_the_middle(browser, c)
        p["stop"].click()
        p.wait_idle()
        assert "(stopped)" in p["talk"].text and p.answers()[0]
        c.workers["decode-0"].signal(signal.SIGCONT)
        c.wait_idle()  # the workers have stopped, too
        assert not p.problems()


def test_hand_over(browser, whole):
    """Between prefill's token and decode's first one the page shows the hand-over."""
    def place():
        return [
            x.get_attribute("id")
            for x in browser.find_elements(By.CSS_SELECTOR, "#path [aria-current=step]")
        ]

    with a_cluster(envs={"decode-0": {"TANDEM_FAULT": "slot_ready:stop:1"}}) as c:
        p = Page(browser, http_port(c))
        p.until(lambda: p["model"].get_property("value"), "no models")
        p.set(**LONG, alternatives=0)
        p.ask("Once upon a time")
        p.until(lambda: p.answers() and p.answers()[0], "no first token")
        assert place() == ["at-handover"] and not p.is_idle()
        c.workers["decode-0"].signal(signal.SIGCONT)
        p.wait_idle()
        assert p.answers() == [whole] and place() == []
        assert not p.problems()


def test_workers_death(browser, whole):
    """The answer goes on at another worker, and the page shows who is there."""
    with a_cluster(envs={"decode-0": {"TANDEM_FAULT": "decode_token:kill:30"}}) as c:
        p = in_the_middle(browser, c)
        p.until(lambda: "decode: 0 of 0 ready" in p["workers"].text, "the death is not shown")
        c.workers.pop("decode-0").wait_exit(PATIENCE_S)
        c.start_worker("decode")
        p.wait_idle()
        assert p.answers() == [whole]
        p.until(lambda: "decode: 1 of 1 ready" in p["workers"].text, "the new worker is not shown")
        assert not p.problems()


def test_reload_in_the_middle(browser, whole):
    """The same answer goes on."""
    with a_cluster(envs={"decode-0": {"TANDEM_FAULT": "decode_token:stop:30"}}) as c:
        p = in_the_middle(browser, c)
        browser.refresh()
        p.until(lambda: p.answers() and p.answers()[0], "the talk is lost")
        assert not p.is_idle()
        c.workers["decode-0"].signal(signal.SIGCONT)
        p.wait_idle()
        assert p.answers() == [whole]
        assert not p.problems()


def test_key(browser, tmp_path):
    """A router with tenants' keys: the page asks, and uses what it is given."""
    def tenant(name, **fields):
        digest = hashlib.sha256(f"sk-{name}-0123456789".encode()).hexdigest()
        return {"name": name, "keys": ["sha256:" + digest], **fields}

    file = tmp_path / "tenants.json"
    file.write_text(json.dumps({"tenants": [tenant("acme"), tenant("watch", operator=True)]}))
    with a_cluster("--tenants", str(file)) as c:
        p = Page(browser, http_port(c))
        p.until(lambda: p["key-form"].is_displayed(), "no key is asked for")
        for key in ("sk-wrong-0123456789", "sk-acme-0123456789"):
            p["key"].send_keys(key, Keys.ENTER)
            p.until(lambda: "accepted" in p["key-note"].text or "is used" in p["key-note"].text,
                    "nothing is said of the key")
        p.until(lambda: "ready" in p["workers"].text, "no workers")
        p.set(kind="completion", max_tokens=8, temperature=0)
        p.ask("Once")
        p.wait_idle()
        assert len(p.answers()) == 1 and p.answers()[0]
        assert "sk-acme-0123456789" not in browser.page_source
        # of workers each key sees what is its own to see
        assert p["withheld"].is_displayed() and "decode-0" not in p["workers"].text
        browser.execute_script("sessionStorage.clear()")
        browser.refresh()
        p.until(lambda: p["key-form"].is_displayed(), "no key is asked for")
        p["key"].send_keys("sk-watch-0123456789", Keys.ENTER)
        p.until(lambda: "decode-0" in p["workers"].text, "an operator is not told of workers")
        assert "prefill-0" in p["workers"].text and " held, " in p["workers"].text
        assert not p["withheld"].is_displayed() and not p.problems()


# Of each element with text of its own that is shown and not disabled: its text, and the contrast
# of its colour to what is behind it (WCAG 2.1, 1.4.3; parts of the page are opaque).
CONTRASTS = """
const light = (c) => { const x = c / 255; return x <= 0.03928 ? x / 12.92 :
  ((x + 0.055) / 1.055) ** 2.4; };
const rgb = (t) => t.match(/[0-9.]+/g).map(Number);
const luminance = (t) => { const [r, g, b] = rgb(t).map(light);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (e) => { for (; e; e = e.parentElement) {
  const c = getComputedStyle(e).backgroundColor; if (rgb(c)[3] !== 0) return c; }
  return 'rgb(255, 255, 255)'; };
return [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() && !e.disabled &&
  [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())).map((e) => {
    const [a, b] = [getComputedStyle(e).color, behind(e)].map(luminance);
    return [e.textContent.slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; });
"""


def save_pictures(b, width, colours):
    """All of the page, in parts: two of them are in docs/pictures, which has a limit of bytes."""
    height = b.execute_script("scrollTo(0, 0); return document.documentElement.scrollHeight")
    for i, top in enumerate(range(0, height, 1900)):
        b.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {
                "width": width, "height": min(height - top, 1900), "deviceScaleFactor": 1,
                "mobile": width < 500
            })
        b.execute_script(f"scrollTo(0, {top})")
        b.save_screenshot(os.path.join(PICTURES, f"page-{width}-{colours}-{i}.png"))


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 820, 1440])
def test_widths_and_colours(width, colours):
    """Nothing is wider than the window, each text can be read, and all cards are there."""
    dark = colours == "dark"
    b = start_browser(width, dark)
    with a_cluster("--slo-class", "chat:ttft=60000,tpot=5000 bulk:ttft=600000", prefill=2,
                   decode=2) as c:
        p = Page(b, http_port(c))
        b.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": colours}]})
        b.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 1600, "deviceScaleFactor": 1, "mobile": width < 500})
        p.until(lambda: "2 of 2 ready" in p["workers"].text, "no workers")
        p.set(kind="chat", max_tokens=60, seed=3)
        for text in ("Tell me a story of a fox.", "And then?"):
            p.ask(text)
            p.wait_idle()
        b.find_element(By.CSS_SELECTOR, "#talk li.assistant .tokens").send_keys(Keys.ARROW_RIGHT)
        p.until(lambda: "median" in p["latencies"].text, "no latencies")
        p.until(lambda: "chat: 100.0 % of 2 met" in p["models"].text, "no class")
        assert "bulk: none finished yet" in p["models"].text
        assert b.execute_script("return document.documentElement.scrollWidth") <= width
        b.execute_script("document.getElementById('settings').open = false")
        contrasts = b.execute_script(CONTRASTS)
        assert len(contrasts) > 60 and min(x for _, x in contrasts) >= 4.5, sorted(
            contrasts, key=lambda x: x[1])[:5]
        if PICTURES:
            save_pictures(b, width, colours)
        b.execute_script("document.querySelector('h2').style.color = "
                         "getComputedStyle(document.body).backgroundColor")
        assert min(x for _, x in b.execute_script(CONTRASTS)) < 1.1  # it is measured
    b.quit()
