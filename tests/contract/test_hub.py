"""Every command that looks a name up on a hub that does not answer: an error, and no retries."""

import os
import socket
from pathlib import Path

import pytest

from tests.processes import ran

TOKENIZER = "the tokenizer of the model org/none"


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("asyncrl.commands.train recipes/quickstart.yaml model.path=org/none", TOKENIZER),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (
                    "asyncrl.commands.train recipes/quickstart.yaml data.train=org/none",
                    "the dataset org/none:train from the hub",
                ),
                ("asyncrl.commands.serve org/none", "the config of the model org/none"),
                ("asyncrl.commands.evaluate org/none data/arithmetic_test.jsonl", TOKENIZER),
            )
        ),
    ],
)
def test_no_command_retries_a_hub_that_is_not_there(tmp_path: Path, inputs, command: str, asked: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = f"http://127.0.0.1:{server.getsockname()[1]}"
    module, *words = command.split()
    words += [f"run.dir={tmp_path}/run"] if module == "asyncrl.commands.train" else []
    environment = {**os.environ, "HF_ENDPOINT": gone, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": ""}
    ended = ran("-m", module, *words, env=environment, timeout_s=300, code=2)
    said = ended.stdout + ended.stderr
    assert f"asked: {asked}" in said
    assert "Retrying" not in said
