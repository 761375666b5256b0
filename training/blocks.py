"""Many blocks of many documents through the drafter at once, exactly as inference drafts one.

N anchors are drawn in each document. The block of an anchor at position a fills the slots a + 1 to
a + K; it sees the target's features of the positions strictly before a and the anchor's own entry,
and nothing else. Off by one here, a drafter still trains and accepts next to nothing.

Legend: B documents, T tokens of a document, N anchors of a document, R blocks of an anchor (one a
noise draw), K slots, H target hidden width, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from flashmap.modeling.modeling_flashmap import FlashMapDraftModel

from .attention import CAUSAL, attention
from .documents import Documents

Entries = list[tuple[Tensor, Tensor]]


class Blocks(NamedTuple):
    """Documents of a step and the blocks drawn in them.

    Attributes:
        ids: token ids (B, T), int64; what lies past a document's end is 0.
        anchors: positions of the anchors (B, N), int64.
        ends: tokens of each document (B), int64.
    """

    ids: Tensor
    anchors: Tensor
    ends: Tensor


class Slots(NamedTuple):
    """What the slots of all blocks should become, each (B N, K).

    Attributes:
        positions: absolute positions.
        tokens: the document's tokens there.
        valid: whether the document reaches that far.
    """

    positions: Tensor
    tokens: Tensor
    valid: Tensor


class Context(NamedTuple):
    """What blocks may look at: keys and values a layer, each (B, A, T + N, d), and the mask
    (B, 1, N R K, T + N), True where a slot may look."""

    entries: Entries
    mask: Tensor


def draw_blocks(
    documents: Documents, rows: Tensor, num_anchors: int, length: int, generator: torch.Generator
) -> Blocks:
    """The documents `rows` (B), cut to `length`, with random anchors that have a token after them.

    Every document gets as many anchors, whatever its length, so that short answers count as much.
    """
    device = documents.tokens.device
    starts, prompts = documents.offsets[rows], documents.prompt_lengths[rows]
    ends = (documents.offsets[rows + 1] - starts).clamp(max=length)
    places = torch.arange(length, device=device)
    inside = places < ends[:, None]
    flat = torch.where(inside, starts[:, None] + places, 0)
    ids = torch.where(inside, documents.tokens[flat].long(), 0)
    first = torch.minimum(prompts, ends - 2)[:, None]
    chance = torch.rand(len(rows), num_anchors, generator=generator, device=device)
    anchors = first + (chance * (ends[:, None] - 1 - first)).long()
    return Blocks(ids, anchors, ends)


def slots_of(blocks: Blocks, block_size: int) -> Slots:
    """Positions, tokens and validity of every block's slots."""
    steps = torch.arange(1, block_size + 1, device=blocks.ids.device)
    positions = blocks.anchors[..., None] + steps
    inside = positions < blocks.ends[:, None, None]
    places = positions.flatten(1).clamp(max=blocks.ids.shape[1] - 1)
    tokens = blocks.ids.gather(1, places).view(positions.shape)
    return Slots(positions.flatten(0, 1), tokens.flatten(0, 1), inside.flatten(0, 1))


def encode_documents(model: FlashMapDraftModel, features: Tensor) -> Entries:
    """Keys and values of every position of documents with `features` (B, T, n H)."""
    times = torch.arange(features.shape[1], device=features.device)
    return model.context_entries(features, times.expand(len(features), -1))


def build_context(
    model: FlashMapDraftModel,
    shared: Entries,
    anchors: Tensor,
    anchor_embeds: Tensor,
    repeats: int = 1,
) -> Context:
    """The context of the blocks at `anchors` (B, N), `repeats` R of each, side by side.

    `shared` are the documents' entries, `anchor_embeds` (B, N, H) the anchors' embeddings.
    """
    own = model.anchor_entries(anchor_embeds, anchors)
    entries = [
        (torch.cat((key, own_key), dim=2), torch.cat((value, own_value), dim=2))
        for (key, value), (own_key, own_value) in zip(shared, own, strict=True)
    ]
    batch, num_anchors = anchors.shape
    times = torch.arange(shared[0][0].shape[2], device=anchors.device)
    before = times < anchors[..., None]
    mine = torch.eye(num_anchors, dtype=torch.bool, device=anchors.device)
    mask = torch.cat((before, mine.expand(batch, -1, -1)), dim=-1)
    rows = repeats * model.config.block_size
    return Context(entries, mask.repeat_interleave(rows, dim=1)[:, None])


@dataclass(frozen=True)
class Target:
    """The frozen target, as training uses it.

    Attributes:
        model: the target.
        taps: its layers whose outputs are the features.
        embedding: the first V rows of its token embedding, (V, H).
    """

    model: PreTrainedModel
    taps: list[int]
    embedding: Tensor

    @torch.no_grad()
    def read(
        self, drafter: FlashMapDraftModel, ids: Tensor, *, logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Features (B, T, n H) of documents (B, T), and the logits (B, T, V) if asked for.

        Documents need no mask: what is past their end follows everything that is looked at.
        """
        with drafter.target_features(self.model) as tap, attention(self.model, CAUSAL):
            if logits:
                out = self.model(input_ids=ids, use_cache=False).logits
                return tap(), out[..., : len(self.embedding)]
            self.model.get_decoder()(input_ids=ids, use_cache=False)
            return tap(), None

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of ids as the target's own module gives them, scaled where it scales."""
        embeds: Tensor = self.model.get_input_embeddings()(ids)
        return embeds

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of the drafter's output (..., H)."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits[..., : len(self.embedding)]


def target_slots(logits: Tensor, blocks: Blocks, block_size: int) -> Tensor:
    """The target's logits for each slot given the document before it, (B N, K, V).

    The one for position p stands at p - 1, so those of a block start at its anchor.
    """
    batch, length, vocab = logits.shape
    steps = torch.arange(block_size, device=logits.device)
    places = (blocks.anchors[..., None] + steps).clamp(max=length - 1)
    rows = torch.arange(batch, device=logits.device)[:, None, None] * length + places
    picked = F.embedding(rows.flatten(), logits.reshape(-1, vocab))
    return picked.view(-1, block_size, vocab)
