"""A real client asks a real server over HTTP: streaming, many at once, and one that hangs up."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.engine_pairs import BLOCK, next_token, write_tokenizer

TESTS = Path(__file__).resolve().parents[2]
BOOT = "from support import vllm_cpu\nvllm_cpu.prepare()\n"
LENGTH, CLIENTS, PATIENCE = 24, 16, 240


@pytest.fixture(scope="module")
def address(right: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server of the right pair listens, started by its command line."""
    write_tokenizer(right / "target")
    boot = tmp_path_factory.mktemp("boot")
    (boot / "sitecustomize.py").write_text(BOOT)  # for every process that the server starts
    path = os.pathsep.join([str(boot), str(TESTS), *filter(None, sys.path)])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(right / "target"),
        "--speculative-config", f'{{"model": "{right / "draft"}"}}', "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "16",
        "--max-num-batched-tokens", "256", "--served-model-name", "right",
    ]  # fmt: skip
    log = boot / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path}, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            wait(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Return when the server answers."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except OSError:
            time.sleep(1)
    pytest.fail(f"no server at {url}:\n{log.read_text()[-4000:]}")


def client(address: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)


def stream(address: str, token: int) -> Any:
    """A completion that streams, with the token as its prompt."""
    return client(address).completions.create(
        model="right", prompt=[token], max_tokens=LENGTH, temperature=0.0, stream=True
    )


def expected(token: int) -> list[int]:
    """What the right target says after a token."""
    text = [next_token(token)]
    while len(text) < LENGTH:
        text.append(next_token(text[-1]))
    return text


def read(answer: Any) -> tuple[list[int], int]:
    """The tokens of a stream, and in how many pieces they came."""
    pieces = [chunk.choices[0].text for chunk in answer if chunk.choices]
    return [int(word) for word in "".join(pieces).split()], len([one for one in pieces if one])


def test_many_stream_at_once(address: str) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda token: read(stream(address, token)), range(CLIENTS)))
    for token, (text, pieces) in enumerate(answers):
        assert text == expected(token)
        # One piece of the prefill's token, then one a round, some of which may be joined.
        assert pieces <= 2 + (LENGTH - 1) // (BLOCK + 1)


def test_a_client_that_hangs_up_harms_nobody(address: str) -> None:
    broken = stream(address, 1)
    next(iter(broken))
    broken.close()
    assert read(stream(address, 2))[0] == expected(2)
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    [running] = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    assert float(running.split()[-1]) == 0.0
