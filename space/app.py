"""The page: FlashMap and plain decoding race on one prompt, side by side.

    python space/app.py

README.md names the two variables that choose the pair. The race is in race.py, what is shown of it
in board.py; here is the page and what its buttons do.
"""

import logging
import os
import re
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gradio as gr
import spaces  # before torch: on ZeroGPU it takes CUDA's place
import torch

from board import Board, heading, note, plot, score
from pair import Pair, choose, load
from race import FLASHMAP, PLAIN, Event, Settings, encode, frames, gpu_seconds, race, warm_up

EXAMPLES = {
    "Better sleep": "List five tips for better sleep.",
    "Python": "Write a Python function that adds two numbers.",
    "Photosynthesis": "What is photosynthesis?",
    "E-mail": "Write a short e-mail that asks a colleague for the slides of yesterday's meeting.",
    "Story": "Tell a short story about a lighthouse keeper and a whale.",
    "Primes": "What is a prime number? Name the first ten.",
}
LIMIT_S = 120.0  # the longest race
MOST_TOKENS, MOST_DRAWS = 384, 8
LINKS: list[Any] = ["api", "settings"]
THEME = gr.themes.Base(
    primary_hue="indigo",
    neutral_hue="slate",
    font=["system-ui", "sans-serif"],
    font_mono=["ui-monospace", "monospace"],
)
STYLE = Path(__file__).with_name("style.css")
log = logging.getLogger("flashmap.space")


def explain(error: Exception) -> str:
    """An error in words for the visitor."""
    if isinstance(error, gr.Error):  # ZeroGPU's: quota, duration, a worker that was ended
        return re.sub(r"<[^>]*>", "", f"{error.title}: {error.message}")
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error):
        return "The machine ran out of memory. Ask for fewer new tokens, or a shorter prompt."
    if isinstance(error, ValueError):
        return str(error)
    log.exception("a race failed", exc_info=error)
    return f"Something broke ({type(error).__name__}). It is not your prompt; try again."


class Page:
    """The page for `pair`: `blocks` is what Gradio serves."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._stopping: set[str | None] = set()  # sessions that pressed Stop
        self._decode = spaces.GPU(duration=gpu_seconds)(self._on_gpu)
        with gr.Blocks(title="FlashMap", analytics_enabled=False) as self.blocks:
            gr.HTML(_introduction(pair))
            with gr.Row(elem_id="ask"):
                self._prompt = gr.Textbox(
                    next(iter(EXAMPLES.values())), label="Prompt", lines=1, max_lines=6, scale=6
                )
                self._start = gr.Button("Race", variant="primary", elem_id="start", min_width=96)
                self._stop = gr.Button("Stop", interactive=False, elem_id="stop", min_width=96)
            gr.Examples(
                [[text] for text in EXAMPLES.values()], self._prompt, label="Examples",
                example_labels=list(EXAMPLES),
            )  # fmt: skip
            settings = _settings(pair)
            self._total = gr.HTML(score("idle"), elem_id="total")
            self._status = gr.HTML(note("info", "Both sides answer one prompt."), elem_id="status")
            self._heads, self._texts = {}, {}
            with gr.Row():
                for side in (PLAIN, FLASHMAP):
                    with gr.Column(elem_classes="pane", min_width=280):
                        self._heads[side] = gr.HTML(heading(side))
                        self._texts[side] = gr.HTML(elem_id=f"text-{side}", elem_classes="text")
            self._plot = gr.HTML(plot([], [], pair.block_size + 1), elem_id="plot")
            gr.HTML(_explanation(pair))
            self._result = gr.JSON(visible=False)
            self._connect(settings)

    def _connect(self, settings: list[Any]) -> None:
        """What the buttons do."""
        quick: dict[str, Any] = {
            "queue": False, "show_progress": "hidden", "api_visibility": "private",
        }  # fmt: skip
        state = [self._status, self._start, self._stop]
        started = gr.on([self._start.click, self._prompt.submit], self._begin, None, state, **quick)
        shown = [self._total, *self._heads.values(), *self._texts.values(), self._plot]
        running = started.then(
            self.run, [self._prompt, *settings], [*shown, self._status, self._result],
            api_name="race", concurrency_limit=1,
            show_progress="minimal", show_progress_on=[self._status],
        )  # fmt: skip
        refused = running.failure(self._refuse, None, self._status, **quick)
        # A step of its own: the browser ignores a start that comes before the run is over. After a
        # failure only what waits for failures comes next.
        for ended in (running, refused):
            ended.then(self._rest, None, [self._start, self._stop], **quick)
        self._stop.click(self._ask_to_stop, None, self._stop, **quick)

    def run(
        self,
        prompt: str,
        num_steps: int,
        num_draws: int,
        temperature: float,
        max_new_tokens: int,
        seed: int | None,
        request: gr.Request,
    ) -> Iterator[dict[Any, Any]]:
        """Decode `prompt` on both sides; yields changes of the page, whatever happens."""
        settings = Settings(num_steps, num_draws, temperature, max_new_tokens, seed or 0)
        board, end = Board(self._pair, settings), ""
        deadline = time.monotonic() + LIMIT_S
        yield self._shown(board, note("info", "Reading the prompt…"))
        try:
            with closing(self._decode(encode(self._pair, prompt), settings)) as bundles:
                for bundle in bundles:
                    if isinstance(bundle, str):
                        raise ValueError(bundle)
                    for event in bundle:
                        board.add(event)
                    if request.session_hash in self._stopping:
                        end = board.verdict("Stopped.")
                        break
                    if time.monotonic() > deadline:
                        end = board.verdict(f"Stopped at the time limit of {LIMIT_S:.0f} s.")
                        break
                    yield self._shown(board, note("info", "Both sides are decoding, in turns."))
        except Exception as error:  # noqa: BLE001 - an error ends on the page, whatever it is
            end = note("bad", explain(error))
        yield {**self._shown(board, end or board.verdict()), self._result: board.result()}

    def _on_gpu(
        self, prompt: list[int], settings: Settings
    ) -> Generator[list[Event] | str, None, None]:
        """Bundles of what happens, or in the end what went wrong: on ZeroGPU this is another
        process, and of an error that leaves it only the name would remain."""
        try:
            warm_up(self._pair, prompt)
            with closing(race(self._pair, prompt, settings)) as events:
                yield from frames(events)
        except Exception as error:  # noqa: BLE001 - the visitor is told, the log has the rest
            yield explain(error)

    def _shown(self, board: Board, status: str) -> dict[Any, Any]:
        return {
            self._total: board.score(),
            **{self._heads[side]: board.head(side) for side in board.sides},
            **{self._texts[side]: board.texts[side] for side in board.sides},
            self._plot: board.plot(),
            self._status: status,
        }

    def _begin(self, request: gr.Request) -> dict[Any, Any]:
        self._stopping.discard(request.session_hash)
        return {
            self._status: note("info", "Waiting for a turn: one race runs at a time."),
            self._start: gr.update(interactive=False),
            self._stop: gr.update(interactive=True),
        }

    def _ask_to_stop(self, request: gr.Request) -> Any:
        """Have the visitor's race end after its present turn."""
        self._stopping.add(request.session_hash)
        return gr.update(interactive=False)

    def _rest(self, request: gr.Request) -> dict[Any, Any]:
        self._stopping.discard(request.session_hash)
        return {
            self._start: gr.update(interactive=True),
            self._stop: gr.update(interactive=False),
        }

    def _refuse(self) -> str:
        """What kept a race from its start; what ends one, `run` says itself."""
        return note("bad", "The race did not start. Reload the page and try again.")


def _settings(pair: Pair) -> list[Any]:
    """The controls, in the order of `Settings`."""
    own = Settings()
    look: dict[str, Any] = {"min_width": 260}
    with gr.Accordion("Settings", open=False), gr.Row():
        jumps = gr.Slider(
            1, pair.jumps, pair.draft.config.num_steps, step=1, label="Jumps", buttons=[],
            info="Network passes a draft. More can draft better, and take longer.",
            precision=0, **look,
        )  # fmt: skip
        draws = gr.Slider(
            1, MOST_DRAWS, own.num_draws, step=1, label="Draws", buttons=[],
            precision=0, info="Noise draws a draft, mixed into one proposal.", **look,
        )  # fmt: skip
        temperature = gr.Slider(
            0, 1.5, own.temperature, step=0.1, label="Temperature", buttons=[],
            info="0 always takes the likeliest token; then both texts can be compared.", **look,
        )  # fmt: skip
        tokens = gr.Slider(
            16, MOST_TOKENS, own.max_new_tokens, step=16, label="New tokens", buttons=[],
            precision=0, info="The longest text; it may end before.", **look,
        )  # fmt: skip
        seed = gr.Number(
            own.seed, precision=0, label="Seed", info="The same seed repeats the run.", **look,
        )  # fmt: skip
    return [jumps, draws, temperature, tokens, seed]


def _introduction(pair: Pair) -> str:
    return (
        "<header><h1>FlashMap</h1><p>The same words as plain decoding, several at a time: a small"
        " drafter proposes a block, one pass of the model checks it and keeps what it would have"
        f" said itself.</p><p class='pair'><span>model <b>{_short(pair.names.target)}</b></span>"
        f"<span>drafter <b>{_short(pair.names.draft)}</b></span>"
        f"<span>{pair.dtype} on {pair.target.device.type}</span></p></header>"
    )


def _short(name: str) -> str:
    """A name without the folders before it, and with a short commit."""
    name, at, revision = name.partition("@")
    return "/".join(Path(name).parts[-2:]).lstrip("/") + at + revision[:7]


def _explanation(pair: Pair) -> str:
    colours = "".join(f'<span class="round c{k}">one round </span>' for k in range(3))
    return (
        f'<footer class="about"><p class="legend">{colours}<span class="bonus c0">bonus token'
        "</span> A colour is a round: the drafts that the model accepted, then the bonus token,"
        " which is the model's own. Point at one to see which.</p><details><summary>How the race"
        " is fair</summary><p>Two models that compute at once slow each other down, so the sides"
        " take turns: the one with less time on its clock does its next pass of the model, and a"
        " clock counts only its own side's work, the pass over the prompt included. Rates and"
        f" seconds are by these clocks. Both use the same model object: {pair.dtype}, the same kind"
        " of cache, the same kernels. Plain decoding is a bare loop without the costs of a"
        " library's generate. Before the first race both sides ran once. A draft has"
        f" {pair.block_size} tokens.</p></details></footer>"
    )


def main() -> None:
    """Load the pair, run both sides once and open the page."""
    try:
        pair = load(choose(os.environ))
    except ValueError as error:
        raise SystemExit(f"{error}") from None
    if not spaces.config.Config.zero_gpu:  # there a GPU comes with the first race
        warm_up(pair, encode(pair, next(iter(EXAMPLES.values()))))
    Page(pair).blocks.launch(theme=THEME, css_paths=STYLE, footer_links=LINKS, ssr_mode=False)


if __name__ == "__main__":
    main()
