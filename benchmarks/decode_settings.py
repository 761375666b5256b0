"""What every setting of `spec_generate` gives on a CPU, against plain `generate` with the same one.

    python benchmarks/decode_settings.py [--dtype bfloat16] [--prompts 4] [--tokens 64]
        [--curve-prompts 20] [--out benchmarks/results/decode_settings.csv]

A row a setting: tokens a second of both, tokens a pass, and how many texts are the same. Prompts
are of the evaluation set, every domain in turn. Settings take turns on each prompt, so that a busy
moment hits all of them. About 15 minutes on two cores.

The checks run in both dtypes. In float32 greedy texts have to be those of `generate`; in bfloat16
those of two nearly tied tokens may part. Sampled texts are compared with a second run of the same
seed instead, in bfloat16 alone. The curves, by the number of candidates at temperature 0 and of
draws at temperature 1, run in bfloat16, with shorter texts of more prompts.

The claims: texts are the same; a round with logits processors takes at most 1.1 of one without;
adaptive drafting with a drafter that is always wrong keeps 0.95 of the plain tokens a second; a
batch of 8 decodes 3 times the tokens a second of its prompts one by one; "auto" keeps 0.97 of the
tokens a second of one candidate or draw, which is as much as two runs of the same differ by.

Tokens a pass are the published acceptance length; rounds that adaptive drafting decodes plainly
count as passes with one token. `round` and `rate` are medians over the prompts of a round's time
and of tokens a second, beside those of the setting that `beside` names.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from decode_cpu import RoundClock, append_rows, encode, machine
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from flashmap import load_pair
from flashmap.prompts import read_prompts

PROMPTS = Path(__file__).resolve().parents[1] / "models/smollm2-135m/eval_prompts.jsonl"
MOST_OVERHEAD, LEAST_ADAPTIVE, LEAST_BATCH, LEAST_AUTO = 1.1, 0.95, 3.0, 0.97
BATCH = 8
BAD_WORDS = [[28], [30], [260, 253]]
Processors = Callable[[int, torch.Tensor], list[Any]]


def nothing(prompt_length: int, ends: torch.Tensor) -> list[Any]:
    """No logits processor."""
    return []


def at_least(prompt_length: int, ends: torch.Tensor) -> list[Any]:
    """No end before 48 new tokens."""
    return [MinNewTokensLengthLogitsProcessor(prompt_length, 48, ends)]


@dataclass(frozen=True)
class Setting:
    """How to decode.

    Attributes:
        name: of the row.
        drafts: arguments of `spec_generate` that `generate` has none for.
        samples: those that both have.
        processors: made for a prompt's length and the target's end tokens.
        useless: whether the drafter is always wrong.
        beside: name of the setting that it is compared with.
    """

    name: str
    drafts: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)
    processors: Processors = nothing
    useless: bool = False
    beside: str = "greedy"


GREEDY = [
    Setting("greedy"),
    Setting("repetition 1.3", processors=lambda n, ends: [RepetitionPenaltyLogitsProcessor(1.3)]),
    Setting("bad words", processors=lambda n, ends: [NoBadWordsLogitsProcessor(BAD_WORDS, ends)]),
    Setting("min_new_tokens 48", processors=at_least),
    Setting("num_draws 4", {"num_draws": 4}),
    Setting("num_draws auto", {"num_draws": "auto"}),
    Setting("num_candidates 4", {"num_candidates": 4}),
    Setting("num_candidates auto", {"num_candidates": "auto"}),
    Setting("adaptive", {"adaptive": True}),
    Setting("adaptive, num_candidates 4", {"adaptive": True, "num_candidates": 4}),
    Setting("useless drafter", useless=True),
    Setting("adaptive, useless drafter", {"adaptive": True}, useless=True),
]
WARM = {"temperature": 0.8}
SAMPLED = [
    Setting("sampled", samples=WARM, beside="sampled"),
    Setting("top_k 20", samples={**WARM, "top_k": 20}, beside="sampled"),
    Setting("top_p 0.9", samples={**WARM, "top_p": 0.9}, beside="sampled"),
    Setting("min_p 0.05", samples={**WARM, "min_p": 0.05}, beside="sampled"),
    Setting("sampled, num_draws 4", {"num_draws": 4}, WARM, beside="sampled"),
    Setting("sampled, adaptive", {"adaptive": True}, WARM, beside="sampled"),
]
COUNTS = (1, 2, 4, 8, 16, "auto")


def curve(name: str, **samples: Any) -> list[Setting]:
    """A setting a number of draws or candidates."""
    first = f"curve: {name} {COUNTS[0]}"
    return [Setting(f"curve: {name} {n}", {name: n}, samples, beside=first) for n in COUNTS]


CURVES = [*curve("num_candidates"), *curve("num_draws", temperature=1.0)]


@dataclass
class Found:
    """What a setting gave, an entry a prompt."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    plain_tokens: list[int] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def plain_rate(self) -> float:
        """Tokens a second of `generate`."""
        return sum(self.plain_tokens) / sum(self.plain_seconds)

    @property
    def rates(self) -> list[float]:
        """Tokens a second on each prompt."""
        return [count / taken for count, taken in zip(self.tokens, self.seconds, strict=True)]

    def row(self, setting: Setting, beside: "Found") -> dict[str, Any]:
        """The row of a setting."""
        return {
            "setting": setting.name,
            "texts": len(self.tokens),
            "identical": sum(self.same) if self.same else "",
            "tokens_per_second": f"{self.rate:.2f}",
            "plain_tokens_per_second": f"{self.plain_rate:.2f}",
            "speedup": f"{self.rate / self.plain_rate:.3f}",
            "acceptance_length": f"{statistics.fmean(self.lengths):.3f}",
            "beside": setting.beside,
            "round": _beside(self.rounds, beside.rounds),
            "rate": _beside(self.rates, beside.rates),
        }


def _beside(own: list[float], others: list[float]) -> str:
    return f"{statistics.median(one / other for one, other in zip(own, others, strict=True)):.3f}"


class Pair:
    """The embedded pair, and a drafter that is always wrong."""

    def __init__(self, dtype: str) -> None:
        self.target, self.draft, self.tokenizer = load_pair(
            "smollm2-135m", "smollm2-135m", "cpu", dtype
        )
        self.useless = copy.deepcopy(self.draft)
        with torch.no_grad():
            for weight in self.useless.head.parameters():
                weight.neg_()
        self.ends = torch.tensor([self.target.generation_config.eos_token_id]).flatten()

    def prompts(self) -> list[torch.Tensor]:
        """The evaluation set's, each (1, P), every domain in turn."""
        by_domain: dict[str, list[str]] = {}
        for prompt in read_prompts(PROMPTS):
            by_domain.setdefault(prompt.domain, []).append(prompt.text)
        turns = zip(*by_domain.values(), strict=False)
        return [encode(self.tokenizer, text) for turn in turns for text in turn]

    def decode(
        self, setting: Setting, ids: torch.Tensor, tokens: int
    ) -> tuple[Any, float, list[float]]:
        """`spec_generate` with a setting, its seconds, and those of every round."""
        made = LogitsProcessorList(setting.processors(ids.shape[1], self.ends))
        drafter, clock = self.useless if setting.useless else self.draft, RoundClock()
        began = time.perf_counter()
        out = drafter.spec_generate(
            self.target, ids, tokens, seed=0, logits_processor=made, streamer=clock,
            **setting.drafts, **setting.samples,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        arrivals = clock.times[1:]  # the prompt is shown before its pass
        return out, seconds, [end - start for start, end in pairwise(arrivals)]

    def decode_plainly(
        self, setting: Setting, ids: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, float]:
        """`generate` with the same setting: the sequence (1, P + n), and its seconds."""
        made = LogitsProcessorList(setting.processors(ids.shape[1], self.ends))
        sampled = bool(setting.samples)
        options = {"top_k": 0, "top_p": 1.0, **setting.samples} if sampled else {}
        torch.manual_seed(0)
        began = time.perf_counter()
        out = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=sampled,
            logits_processor=made, **options,
        )  # fmt: skip
        return out, time.perf_counter() - began

    def measure(
        self, settings: list[Setting], prompts: list[torch.Tensor], tokens: int, repeat: bool
    ) -> list[dict[str, Any]]:
        """A row a setting; `repeat` says whether sampled texts are made a second time."""
        found = {setting.name: Found() for setting in settings}
        for setting in settings:  # constants and trials of the first call
            self.decode(setting, prompts[0], 4)
        for number, ids in enumerate(prompts, 1):
            plain: dict[str, tuple[torch.Tensor, float]] = {}
            for setting in settings:
                key = f"{setting.samples} {setting.processors}"
                if key not in plain:
                    plain[key] = self.decode_plainly(setting, ids, tokens)
                self._note(found[setting.name], setting, ids, tokens, plain[key], repeat)
            print(f"{number} of {len(prompts)} prompts", flush=True)
        return [found[one.name].row(one, found[one.beside]) for one in settings]

    def _note(
        self, found: Found, setting: Setting, ids: torch.Tensor, tokens: int,
        plain: tuple[torch.Tensor, float], repeat: bool,
    ) -> None:  # fmt: skip
        """Decode a prompt with a setting and note what came out."""
        out, seconds, rounds = self.decode(setting, ids, tokens)
        found.tokens.append(out.num_new_tokens)
        found.seconds.append(seconds)
        found.rounds.append(statistics.median(rounds))
        found.plain_tokens.append(plain[0].shape[1] - ids.shape[1])
        found.plain_seconds.append(plain[1])
        found.lengths += out.acceptance_lengths
        if not setting.samples:
            found.same.append(out.sequences.equal(plain[0]))
        elif repeat:
            found.same.append(out.sequences.equal(self.decode(setting, ids, tokens)[0].sequences))


def measure_batch(pair: Pair, prompts: list[torch.Tensor], tokens: int) -> dict[str, Any]:
    """The row of a batch beside its prompts one by one, none of which ends early."""
    longest = max(ids.shape[1] for ids in prompts)
    rows = [torch.nn.functional.pad(ids, (longest - ids.shape[1], 0), value=-1) for ids in prompts]
    ids = torch.cat(rows)
    settings: dict[str, Any] = {"max_new_tokens": tokens, "stop_token_ids": []}
    began = time.perf_counter()
    out = pair.draft.spec_generate(
        pair.target, ids.clamp(min=0), attention_mask=ids >= 0, **settings
    )
    together, alone, same = time.perf_counter() - began, 0.0, 0
    for row, one in zip(out.sequences[:, longest:], prompts, strict=True):
        began = time.perf_counter()
        single = pair.draft.spec_generate(pair.target, one, **settings)
        alone += time.perf_counter() - began
        same += row.equal(single.sequences[0, one.shape[1] :])
    return {
        "setting": f"batch {len(prompts)}", "texts": len(prompts), "identical": same,
        "tokens_per_second": f"{len(prompts) * tokens / together:.2f}",
        "plain_tokens_per_second": "", "speedup": "",
        "acceptance_length": f"{out.acceptance_length:.3f}", "beside": "one by one", "round": "",
        "rate": f"{alone / together:.3f}",
    }  # fmt: skip


def measure(dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of results for one dtype."""
    pair = Pair(dtype)
    prompts = pair.prompts()
    checks = GREEDY if dtype == "float32" else GREEDY + SAMPLED
    rows = pair.measure(checks, prompts[: args.prompts], args.tokens, repeat=True)
    rows.append(measure_batch(pair, prompts[:BATCH], args.tokens))
    if dtype == "bfloat16" and args.curve_prompts:
        shorter = args.tokens // 2
        rows += pair.measure(CURVES, prompts[: args.curve_prompts], shorter, repeat=False)
    rows = [{"dtype": dtype, **row} for row in rows]
    for row in rows:
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    return rows


def is_kept(row: dict[str, Any]) -> bool:
    """Whether a row keeps the claims."""
    setting = next((one for one in GREEDY + SAMPLED if one.name == row["setting"]), None)
    exact = row["dtype"] == "float32" or (setting is not None and setting.samples)
    claims = [row["identical"] == row["texts"] or not exact]
    if setting is None:
        claims.append(not row["setting"].startswith("batch") or float(row["rate"]) >= LEAST_BATCH)
        claims.append(not row["setting"].endswith("auto") or float(row["rate"]) >= LEAST_AUTO)
    elif setting.processors is not nothing:
        claims.append(float(row["round"]) <= MOST_OVERHEAD)
    elif setting.useless and setting.drafts:
        claims.append(float(row["speedup"]) >= LEAST_ADAPTIVE)
    return all(claims)


def main() -> None:
    """Measure, print, append to the CSV file, and fail if a claim does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=4, help="of the checks")
    parser.add_argument("--curve-prompts", type=int, default=20, help="of the curves; 0: none")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a text at most")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    args = parser.parse_args()
    rows = [row for dtype in args.dtype or ["bfloat16", "float32"] for row in measure(dtype, args)]
    if args.out is not None:
        append_rows(args.out, [{**machine(), "tokens": args.tokens, **row} for row in rows])
    broken = [row for row in rows if not is_kept(row)]
    if broken:
        raise SystemExit(f"not within the claim: {broken}")


if __name__ == "__main__":
    main()
