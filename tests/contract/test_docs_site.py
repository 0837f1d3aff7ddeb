"""The documentation builds as a site, without a link that leads nowhere; and what its guides name exists."""

import json
import os
import re

from asyncrl.config.recipe import Recipe
from asyncrl.types.metrics import metric_of
from tests.conftest import ROOT
from tests.processes import ran
from tools.document import keys_of

GUIDES = ("tuning", "concepts", "cluster", "quickstart")
OPEN_ENDED = ("rollout.vllm.engine_args.", "rollout.sglang.server_args.")
"""Before the names that an engine knows."""


def build(out, *options):
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return ran("-m", "mkdocs", "build", "--strict", "--quiet", "-d", out, *options, code=None, env=environment)


def test_every_page_is_there_and_every_link_leads_somewhere(tmp_path):
    done = build(tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        place = tmp_path / "site" / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        assert place.is_file(), page.name
    links = re.findall(
        r'href="https://github.com/asyncrl/asyncrl/(?:blob|tree)/main/([^"#]+)"',
        (tmp_path / "site/extending/index.html").read_text(),
    )
    assert len(links) > 5
    assert all((ROOT / link).exists() for link in links)


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[a](../no/such/file.py)\n")
    config = {"site_name": "x", "repo_url": "https://github.com/a/b", "hooks": [str(ROOT / "tools/docs_links.py")]}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(config))
    done = build(tmp_path / "site", "-f", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0
    assert "leads nowhere" in done.stdout + done.stderr


def test_what_the_guides_name_exists():
    keys = set()

    def add(found):
        for key in found:
            keys.add(key.name)
            if key.inner is not None:
                add(keys_of(key.inner, key.name + "."))

    add(keys_of(Recipe))
    named = 0
    for guide in GUIDES:
        for code in re.findall(r"`([^`\n]+)`", (ROOT / "docs" / f"{guide}.md").read_text()):
            word = code.split("=")[0].strip()
            if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", word):
                assert word in keys or word.startswith(OPEN_ENDED), f"{guide}.md: {code} is no key of a recipe"
                named += 1
            elif re.fullmatch(r"[a-z_]+/[a-z_0-9]*", word):
                assert metric_of(word) is not None, f"{guide}.md: {code} is no metric"
                named += 1
    assert named > 60
