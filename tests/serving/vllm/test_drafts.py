"""What is drafted inside the engine is what the model drafts outside of it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.engines import engine, speculator, texts
from torch import Tensor
from transformers import AutoModelForCausalLM

from flashmap import FlashMapDraftModel
from flashmap.serving.options import VARIABLE

PROMPT = [3, 9, 30, 1, 1, 7, 22, 4, 4, 18]
SEED = 2**40 + 17


class Draft(NamedTuple):
    """One block: the position of its anchor, the anchor, and logits (K, V)."""

    position: int
    anchor: int
    logits: Tensor


class Recorder:
    """Notes every block that the engine's draft model makes; rows in the order of the batch."""

    def __init__(self, llm: Any) -> None:
        self.rounds: list[list[Draft]] = []
        self.model = speculator(llm).model
        self._forward, self._size = self.model.forward, self.model._block_size
        self.model.forward = self.forward

    def forward(self, input_ids: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
        hidden: Tensor = self._forward(input_ids, positions, **kwargs)
        logits = self.model.compute_logits(hidden).unflatten(0, (-1, self._size))
        first = slice(None, None, self._size)
        rows = zip(positions[first].tolist(), input_ids[first].tolist(), logits, strict=True)
        self.rounds.append([Draft(*row) for row in rows])
        return hidden


class Outside:
    """The pair of a folder in transformers and modeling/, in float32."""

    def __init__(self, pair: Path) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
        self.drafter = FlashMapDraftModel.from_pretrained(pair / "draft", dtype=torch.float32)

    @torch.no_grad()
    def logits(self, tokens: list[int], position: int, num_steps: int) -> Tensor:
        """The model's own draft (K, V) after the anchor at `position` of a text."""
        states = self.target(torch.tensor([tokens[:position]]), output_hidden_states=True)
        cache = self.drafter.new_cache(1, position + 1)
        features = self.drafter.select_target_hidden(states.hidden_states)
        self.drafter.extend_context(cache, features)
        logits: Tensor = self.drafter.draft(
            torch.tensor([tokens[position]]), cache, self.target.get_input_embeddings(),
            self.target.get_output_embeddings(), num_steps, seed=SEED,
        )  # fmt: skip
        return logits[0]


@pytest.mark.parametrize(
    ("num_steps", "size", "fp8"),
    [(1, 32, False), (2, 32, False), (1, 9, False), (1, 32, True)],
    ids=["one jump", "two jumps", "restricted", "eight bits"],
)
def test_draft_logits_are_the_models(
    num_steps: int, size: int, fp8: bool, random: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_steps": num_steps, "draft_vocab_size": size, "fp8_weights": fp8}
    monkeypatch.setenv(VARIABLE, json.dumps(options | {"fold_noise": False}))
    # The prompt comes in three pieces, the drafts are mostly rejected.
    settings = {"max_num_batched_tokens": 8, "max_num_seqs": 1}
    with engine(random, **settings, draft={}) as llm:
        recorder = Recorder(llm)
        [text] = texts(llm, [PROMPT], temperature=1.0, seed=SEED, max_tokens=16)
    outside, tokens = Outside(random), PROMPT + text
    drafts = [draft for [draft] in recorder.rounds if draft.position < len(tokens)]
    assert len(drafts) > 8
    distances = []
    for draft in drafts:
        assert draft.anchor == tokens[draft.position]
        expected = outside.logits(tokens, draft.position, num_steps)[:, :size]
        assert draft.logits[:, size:].eq(float("-inf")).all()
        found = draft.logits[:, :size]
        distances.append(float((found - expected).abs().max() / expected.abs().max()))
    assert max(distances) <= (0.2 if fp8 else 1e-4)
    assert max(distances) > 1e-3 or not fp8, "the weights are to be rounded"


def test_a_seeded_request_drafts_the_same_in_any_batch(random: Path) -> None:
    others = [[row, 2 * row, 7] for row in range(1, 6)]
    sampling = {"temperature": 1.0, "max_tokens": 12}
    with engine(random, {"draft_sample_method": "probabilistic"}) as llm:
        recorder = Recorder(llm)
        [alone] = texts(llm, [PROMPT], seed=SEED, **sampling)
        single = [draft for [draft] in recorder.rounds]
        recorder.rounds.clear()
        seeds = [*range(5), SEED]
        together = texts(llm, [*others, PROMPT], seed=seeds, **sampling)
        crowd = [draft for drafts in recorder.rounds for draft in drafts]
        assert max(map(len, recorder.rounds)) == 6
    assert together[-1] == alone
    for draft in single:
        same = [
            other
            for other in crowd
            if (other.position, other.anchor) == (draft.position, draft.anchor)
            and (other.logits - draft.logits).abs().max() <= 1e-4 * draft.logits.abs().max()
        ]
        assert same, f"the block after position {draft.position} is another one in the batch"


def test_context_is_written_where_no_drafts_are_wanted(
    random: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(random, {}, max_num_seqs=1) as llm:
        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

        texts(llm, [PROMPT], temperature=0.0, max_tokens=4)
        ours = speculator(llm)
        slot = int(ours._context_slot_mappings[0][0])
        pages = ours.model.context.layout().keys
        entries = [page[divmod(slot, page.shape[1])] for page in pages]
        expected = [entry.clone() for entry in entries]
        for entry in entries:
            entry.zero_()
        # What newer versions do for no drafts: the context of the last step, and no block.
        monkeypatch.setattr(
            DFlashSpeculator, "propose", lambda self: self._precompute_context_kv(0, 1)
        )
        ours.propose()
    for entry, wanted in zip(entries, expected, strict=True):
        assert (entry - wanted).abs().max() <= 1e-5 * wanted.abs().max()
