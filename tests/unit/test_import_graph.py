"""What the change of a file touches, found in the text of a small repository."""

import pytest

from tools.import_graph import ImportGraph

FILES = {
    "pyproject.toml": "",
    "asyncrl/__init__.py": "",
    "asyncrl/losses.py": "",
    "asyncrl/engines.py": '"""Not tests/data/rows.jsonl."""\nENGINES = {"fast": "asyncrl.fast.engine:Fast"}\n',
    "asyncrl/fast/__init__.py": "from asyncrl.errors import Bad\n",
    "asyncrl/fast/engine.py": '"""See asyncrl.losses."""\n',
    "asyncrl/errors.py": "",
    "asyncrl/train.py": 'def main():\n    import asyncrl.engines\n    raise ValueError("run tools/make.py first")\n',
    "asyncrl/page.py": 'PAGE = "page/index.html"\n',
    "asyncrl/page/index.html": "",
    "asyncrl_testing/suite.py": "from asyncrl import losses\n",
    "recipes/quick.yaml": "environment: recipes.agents.counts:Counts\n",
    "recipes/agents/counts.py": "",
    "tools/make.py": "from asyncrl.errors import Bad\n",
    "tests/data/rows.jsonl": "",
    "tests/conftest.py": '@pytest.fixture(scope="session")\ndef inputs():\n    run("tools/make.py")\n',
    "tests/unit/test_losses.py": "from asyncrl_testing.suite import Suite\n",
    "tests/unit/test_rows.py": 'ROWS = HERE / "data" / "rows.jsonl"\n',
    "tests/e2e/conftest.py": (
        '@pytest.fixture\ndef start(inputs):\n    run("-m", "asyncrl.train", f"recipes/{recipe}.yaml")\n'
    ),
    "tests/e2e/test_quick.py": 'def test_it(start):\n    start(recipe="quick")\n',
    "tests/e2e/test_page.py": "from asyncrl import page\n",
}
TESTS = {path for path in FILES if "/test_" in path}


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        ("asyncrl/losses.py", {"tests/unit/test_losses.py": 2}),
        ("asyncrl_testing/suite.py", {"tests/unit/test_losses.py": 1}),
        ("asyncrl/fast/engine.py", {"tests/e2e/test_quick.py": 3}),
        ("asyncrl/fast/__init__.py", {"tests/e2e/test_quick.py": 3}),
        ("asyncrl/errors.py", {"tests/e2e/test_quick.py": 2}),
        ("asyncrl/page/index.html", {"tests/e2e/test_page.py": 2}),
        ("recipes/agents/counts.py", {"tests/e2e/test_quick.py": 2}),
        ("tools/make.py", {"tests/e2e/test_quick.py": 1}),
        ("tests/data/rows.jsonl", {"tests/unit/test_rows.py": 1}),
        ("tests/e2e/conftest.py", {"tests/e2e/test_quick.py": 1, "tests/e2e/test_page.py": 1}),
        ("tests/conftest.py", dict.fromkeys(TESTS, 1)),
        ("pyproject.toml", dict.fromkeys(TESTS, 1)),
        ("tests/unit/test_rows.py", {"tests/unit/test_rows.py": 0}),
        ("docs/that_was_deleted.md", {}),
    ],
)
def test_what_a_change_touches_and_how_near_it_is(changed, touched):
    distances = ImportGraph(FILES).distances([changed])
    assert {path: near for path, near in distances.items() if path in TESTS} == touched


def test_the_nearest_change_counts():
    distances = ImportGraph(FILES).distances(["asyncrl/losses.py", "tests/unit/test_losses.py", "asyncrl/errors.py"])
    assert {path: near for path, near in distances.items() if path in TESTS} == {
        "tests/unit/test_losses.py": 0,
        "tests/e2e/test_quick.py": 2,
    }
