"""The page as a visitor has it: in a headless browser, and through its API, with a tiny pair."""

import inspect
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.space_pairs import Watched, served, toy_pair
from support.visitor import Visitor

from pair import Pair
from race import Settings

pytestmark = pytest.mark.browser


def slow_pair(seconds: float = 0.05, **changes: Any) -> tuple[Pair, Watched]:
    draft = Watched(seconds, **changes)
    pair = toy_pair(draft)
    pair.is_warm = True
    return pair, draft


def test_a_visit(visit: Callable[..., Visitor]) -> None:
    pair, _ = slow_pair()
    with served(pair) as address:
        visitor = visit(address)
        visitor.tab.get_by_role("button", name="Primes").click()
        visitor.wait_until(lambda: "prime" in visitor.tab.get_by_label("Prompt").input_value())
        visitor.start()
        visitor.wait_for_tokens()
        assert visitor.status() == "Both sides are decoding, in turns."  # tokens before the end
        seen = visitor.tokens("flashmap")
        visitor.wait_until(lambda: visitor.tokens("flashmap") > seen + 3)
        visitor.tab.click("#stop")
        assert visitor.wait_for_end() == "Stopped. Up to there the texts are identical."
        assert visitor.tokens("flashmap") < 128

        visitor.open_settings()
        visitor.slide("New tokens", 32)
        visitor.slide("Jumps", 3)
        visitor.start()
        assert visitor.wait_for_end() == "Both texts are identical: all 32 tokens."
        assert visitor.tokens("plain") == visitor.tokens("flashmap") == 32
        assert visitor.text("plain") == visitor.text("flashmap")
        rounds = visitor.tab.locator("#text-flashmap .round")
        bars = visitor.tab.locator("#plot .bar")
        assert bars.count() == rounds.count() - 1 > 5
        assert "Round 3:" in str(rounds.nth(3).get_attribute("data-tip"))
        assert "slower than plain decoding today" in visitor.tab.locator("#total").inner_text()


def test_the_keyboard_is_enough(visit: Callable[..., Visitor]) -> None:
    pair, _ = slow_pair(0.02)
    with served(pair) as address:
        visitor = visit(address)
        prompt = visitor.tab.get_by_label("Prompt")
        prompt.focus()
        prompt.fill("Why?")
        visitor.tab.keyboard.press("Enter")
        visitor.wait_for_tokens()
        for _ in range(10):
            visitor.tab.keyboard.press("Tab")
            if visitor.tab.evaluate("document.activeElement.id") == "stop":
                break
        visitor.tab.keyboard.press("Enter")
        assert visitor.wait_for_end().startswith("Stopped.")


def test_errors_end_the_race_and_are_told(visit: Callable[..., Visitor]) -> None:
    pair, draft = slow_pair(0.0, fail_at=3)
    errors = {
        "": "The prompt is empty",
        "long " * 400: "The prompt is too long: 2,002 tokens",
    }
    with served(pair) as address:
        visitor = visit(address)
        for prompt, message in errors.items():
            visitor.tab.get_by_label("Prompt").fill(prompt)
            visitor.start()
            assert message in visitor.wait_for_end()
        visitor.tab.get_by_label("Prompt").fill("Go")
        failures = {
            MemoryError(): "ran out of memory. Ask for fewer new tokens",
            RuntimeError("DefaultCPUAllocator: can't allocate memory"): "ran out of memory",
            ValueError("num_steps 9: no such grid"): "num_steps 9: no such grid",
            RuntimeError("the wires"): "Something broke (RuntimeError)",
        }
        for error, message in failures.items():
            draft.error = error
            visitor.start()
            assert message in visitor.wait_for_end()
            assert visitor.tokens("flashmap") == 3  # what came before the error stays
        draft.fail_at = None
        visitor.start()
        assert visitor.wait_for_end() == "Both texts are identical: all 128 tokens."


def test_zerogpu_errors_are_told_without_markup() -> None:
    import gradio as gr

    from app import explain

    quota = gr.Error("Over your quota. <a href='x'>Sign in</a>", title="ZeroGPU quota exceeded")
    assert explain(quota) == "ZeroGPU quota exceeded: Over your quota. Sign in"


def test_zerogpu_gets_a_generator_of_plain_things_and_a_legal_duration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import spaces

    from app import Page

    seen: dict[str, Any] = {}

    def decorator(duration: Callable[..., int]) -> Callable[[Any], Any]:
        return lambda task: seen.update(task=task, duration=duration)

    monkeypatch.setattr(spaces, "GPU", decorator)
    pair, _ = slow_pair(0.0, fail_at=4)
    Page(pair)
    assert inspect.isgeneratorfunction(seen["task"])
    # Arguments and results travel between two processes.
    arguments = pickle.loads(pickle.dumps(([40, 41], Settings(max_new_tokens=9))))
    assert 0 < seen["duration"](*arguments) <= 60
    *bundles, message = pickle.loads(pickle.dumps(list(seen["task"](*arguments))))
    assert message == "Something broke (RuntimeError). It is not your prompt; try again."
    assert sum(step.side == "flashmap" for bundle in bundles for step in bundle) == 4


def test_the_time_limit_ends_a_race(
    visit: Callable[..., Visitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.LIMIT_S", 1.0)
    pair, _ = slow_pair()
    with served(pair) as address:
        visitor = visit(address)
        visitor.start()
        assert "Stopped at the time limit of 1 s." in visitor.wait_for_end()


def test_two_visitors_at_once_both_finish(visit: Callable[..., Visitor]) -> None:
    pair, _ = slow_pair(0.05)
    with served(pair) as address:
        visitors = [visit(address), visit(address)]
        visitors[0].start()
        visitors[0].wait_for_tokens()
        visitors[1].start()
        waiting = visitors[1].tab.locator("#status")
        visitors[1].wait_until(lambda: "queue" in waiting.inner_text())
        for visitor in visitors:
            assert visitor.wait_for_end() == "Both texts are identical: all 128 tokens."


def test_a_visitor_who_leaves_ends_the_work(visit: Callable[..., Visitor]) -> None:
    pair, draft = slow_pair(0.1)
    with served(pair) as address:
        visitor = visit(address)
        visitor.start()
        visitor.wait_for_tokens()
        visitor.tab.close()
        deadline = time.monotonic() + 10
        while not draft.closed:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        rounds = draft.rounds
        time.sleep(0.5)
        assert draft.rounds == rounds < 100


def memory_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def test_ten_start_stop_cycles_leave_nothing_behind(visit: Callable[..., Visitor]) -> None:
    pair, draft = slow_pair(0.01)
    with served(pair) as address:
        visitor = visit(address)

        def cycle() -> None:
            visitor.start()
            visitor.wait_for_tokens()
            visitor.tab.click("#stop")
            assert visitor.wait_for_end().startswith("Stopped.")

        for _ in range(3):  # threads and buffers that the server keeps
            cycle()
        threads, memory, closed = threading.active_count(), memory_mb(), draft.closed
        for _ in range(10):
            cycle()
        assert draft.closed == closed + 10
        assert threading.active_count() <= threads
        assert memory_mb() < memory + 16


def test_an_empty_seed_is_a_seed(visit: Callable[..., Visitor]) -> None:
    pair, _ = slow_pair(0.0)
    with served(pair) as address:
        visitor = visit(address)
        visitor.open_settings()
        visitor.slide("New tokens", 32)
        visitor.tab.get_by_label("Seed").fill("")
        visitor.start()
        assert visitor.wait_for_end() == "Both texts are identical: all 32 tokens."


def test_a_race_that_cannot_start_is_told(
    visit: Callable[..., Visitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise TypeError("no board")

    pair, _ = slow_pair(0.0)
    with served(pair) as address:
        visitor = visit(address)
        with monkeypatch.context() as patch:
            patch.setattr("app.Board", broken)
            visitor.start()
            assert "The race did not start." in visitor.wait_for_end()
        visitor.start()
        assert visitor.wait_for_end() == "Both texts are identical: all 128 tokens."


def test_programs_use_the_same_race() -> None:
    from gradio_client import Client

    pair, draft = slow_pair(0.0)
    with served(pair) as address:
        client = Client(address, verbose=False)
        *_, result = client.predict("Why?", 2, 3, 0.9, 24, 5, api_name="/race")
        again = client.predict("Why?", 2, 3, 0.9, 24, 5, api_name="/race")[-1]
        assert result["seed"] == 5 and len(result["plain"]["token_ids"]) == 24
        for side in ("plain", "flashmap"):
            assert result[side]["token_ids"] == again[side]["token_ids"]
        draft.seconds, draft.closed = 0.1, 0
        job = client.submit("Why?", 1, 1, 0.0, 300, 0, api_name="/race")
        with waiting_at_most(10):
            while not job.outputs():
                time.sleep(0.05)
        job.cancel()
        with waiting_at_most(10):
            while not draft.closed:
                time.sleep(0.05)
        assert draft.rounds < 300


@contextmanager
def waiting_at_most(seconds: float) -> Iterator[None]:
    """The block must be done in time."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds
