"""Requests that schemathesis makes from the served OpenAPI schema, valid and broken in every way that it knows, against
the server behind its key."""

import asyncio
import os
import sys

from tests.serving import serving

KEY = "Authorization: Bearer secret"
EXAMPLES = 8
"""Random requests for each route, always the same ones, beside the systematic ones."""


async def test_the_server_does_what_its_schema_says(tmp_path):
    """No 5xx; statuses, content types and bodies as described; what breaks the schema is refused; so is no key."""
    async with serving(api_key="secret", chunk_tokens=100) as served:
        options = ["-H", KEY, "--phases=coverage,fuzzing", "--checks=all", "--exclude-checks=positive_data_acceptance"]
        options += ["--generation-deterministic", f"--max-examples={EXAMPLES}"]
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json", *options),
            cwd=tmp_path,
            env={**os.environ, "SCHEMATHESIS_HOOKS": os.path.join(os.path.dirname(__file__), "schema_check.py")},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(240):
                output, _ = await run.communicate()
        finally:
            if run.returncode is None:
                run.kill()
                await run.wait()
        assert run.returncode == 0, output.decode()[-8000:]
        for path in ("/v1/chat/completions", "/v1/completions"):
            answered = {status: n for (route, status), n in served.metrics.requests.items() if route == path}
            assert answered[200] > EXAMPLES / 4, answered
            assert answered[400] > EXAMPLES, answered
            assert not [status for status in answered if status >= 500], answered
