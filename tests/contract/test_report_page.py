"""The page of a report in a real browser without a network."""

import io
import json
import re
import shutil
import subprocess

import pytest
from PIL import Image

from asyncrl.commands.report import main
from asyncrl.observability.charts import CHARTS
from asyncrl.types.images import ImageStore
from tools.make_sick_run import write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=5000",
)  # fmt: skip

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"), pytest.mark.timeout(400)]


def dom_of(page, profile, script="", *, window="1200,900"):
    """The document after `script` has run in it."""
    shown = page
    if script:
        shown = page.with_name("with_script.html")
        shown.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    command = [
        CHROMIUM,
        *QUIET,
        f"--window-size={window}",
        f"--user-data-dir={profile}",
        "--dump-dom",
        f"file://{shown}",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_everything_is_drawn_and_a_trajectory_is_coloured(tmp_path):
    path = write_run(tmp_path / "run", "collapsed", 60)
    assert main([str(path)]) == 0
    opened = "document.querySelector('.trajectory').open = true; document.getElementById('theme').click();"
    dom = dom_of(path / "report.html", tmp_path / "profile", opened)
    measured = {key for line in (path / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    drawn = [chart for chart in CHARTS if measured.intersection(map(str, chart.keys))]
    assert {chart.title for chart in CHARTS if chart not in drawn} == {"Off-policy guard"}, "it is off by default"
    assert re.search(rf'<html[^>]*data-charts="{len(drawn)}"[^>]*data-ready="1"', dom)
    assert dom.count("<canvas") == len(drawn)
    assert 'data-title="Collapsed importance ratio"' in dom
    assert dom.count('class="span"') >= 30, "steps in the timeline"
    assert dom.count('class="trajectory"') == 60
    assert dom.count('class="tool"') == 7, "the tokens that the environment wrote"
    assert len(re.findall(r'<span title="version \d+, replica \d, log-probability', dom)) == 33


def test_images_are_shown_where_they_stand(tmp_path):
    path = write_run(tmp_path / "run", "collapsed", 60)
    store = ImageStore(tmp_path / "images")
    Image.new("RGB", (400, 300), "red").save(file := io.BytesIO(), "png")
    key = store.put(file.getvalue())
    config = json.loads((path / "config.json").read_text())
    config["recipe"]["data"] = {"image_directory": str(store.directory)}
    (path / "config.json").write_text(json.dumps(config))
    lines = (path / "samples.jsonl").read_text().splitlines()
    shown = f"a\ufffc{key}b"
    sample = {
        "ordinal": 1,
        "prompt": f"look \ufffc{key} and \ufffc{'0' * 28}",
        "response": shown,
        "reward": 1.0,
        "segments": [[0, 1, 0, 0, "policy"], [1, 7, 0, 0, "environment"]],
        "token_ends": [1, 9, 16, 23, 30, 30, 31],  # as four tokens with the key, and one more, are written
        "logprobs": [-1.0, 0, 0, 0, 0, 0, 0],
        "branches": [{"response": "<other>", "turns": 1, "at_token": 7, "text": "anew", "main_text": "as before"}],
    }
    (path / "samples.jsonl").write_text("\n".join([*lines, json.dumps(sample)]) + "\n")
    assert main([str(path)]) == 0
    opened = "document.querySelector('.trajectory').open = true;"
    dom = dom_of(path / "report.html", tmp_path / "profile", opened)
    found = re.search(r'<div class="tokens">look .*?</details>', dom, re.DOTALL)[0]
    assert len(re.findall(rf'<img src="data:image/png;base64,[^"]+" alt="{key}">', found)) == 2
    assert f"[image {'0' * 28}]" in found, "lost"
    assert 'from token 7 on "anew", where the conversation above has "as before"' in found
    assert '<div class="tokens">&lt;other&gt;</div>' in found
    assert key not in re.sub(r"<img[^>]*>", "", found)


def test_it_fits_a_narrow_window_and_searches(tmp_path):
    path = write_run(tmp_path / "run", "starved", 30)
    assert main([str(path)]) == 0
    script = (
        "document.title = document.documentElement.scrollWidth - innerWidth;"
        "const s = document.getElementById('search'); s.value = 'What is 17+7'; s.dispatchEvent(new Event('input'));"
    )
    dom = dom_of(path / "report.html", tmp_path / "profile", script, window="500,900")
    assert int(re.search(r"<title>(-?\d+)</title>", dom)[1]) <= 0, "nothing is wider than the window"
    assert "1 of 30" in dom
