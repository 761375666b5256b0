"""Trains the small drafter with the plainest objective: cross-entropy of the one jump to tokens.

    python train.py TARGET_FOLDER DATA.pt OUT_FOLDER

A step takes B answers, runs the target over them once, and drafts N blocks an answer at random
anchors, all in one pass of the drafter: a block sees the target's features strictly before its
anchor, and its own anchor's entry. Slot k is weighted by exp(-(k - 1) / 4), since a slot counts
only where all before it were accepted. The noise gate starts at 0: under this objective the best
map ignores the noise.

Legend: B answers, T tokens an answer, N blocks an answer, K slots, H target hidden width.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from generate import Document
from llama import Llama
from torch import Tensor

from flashmap import FlashMapConfig, FlashMapDraftModel

CONFIG = FlashMapConfig(
    target_model="HuggingFaceTB/SmolLM2-135M-Instruct",
    target_hidden_size=576,
    vocab_size=49152,
    target_layer_ids=[1, 8, 14, 20, 27],
    block_size=8,
    hidden_size=192,
    num_hidden_layers=4,
    num_attention_heads=6,
    intermediate_size=768,
    cond_dim=64,
    time_embed_dim=64,
    # Times at which the chance-corrected accuracy of decoding the state is i / n, for 49152 tokens.
    jump_grids={
        "1": [0.0, 1.0],
        "2": [0.0, 0.8085630020740834, 1.0],
        "3": [0.0, 0.7906717137081579, 0.8236702838722515, 1.0],
        "4": [0.0, 0.779002964143092, 0.8085630020740834, 0.8312237542865432, 1.0],
    },
)
LENGTH = 320
Batch = tuple[Tensor, Tensor, Tensor]


class Data:
    """Answers as padded token ids (documents, T), with where each answer starts and ends."""

    def __init__(self, documents: list[Document], device: str) -> None:
        self.ids = torch.zeros(len(documents), LENGTH, dtype=torch.long)
        for row, (prompt, answer, _, _) in enumerate(documents):
            tokens = (prompt + answer)[:LENGTH]
            self.ids[row, : len(tokens)] = torch.tensor(tokens)
        self.ids = self.ids.to(device)
        starts = [len(prompt) for prompt, *_ in documents]
        ends = [min(len(prompt) + len(answer), LENGTH) for prompt, answer, *_ in documents]
        self.starts = torch.tensor(starts, device=device)
        self.ends = torch.tensor(ends, device=device)

    def batch(self, rows: Tensor, num_blocks: int) -> Batch:
        """Ids (B, T), random anchors (B, N) that have a token after them, and ends (B)."""
        starts, ends = self.starts[rows, None], self.ends[rows, None]
        spread = torch.rand(len(rows), num_blocks, device=rows.device)
        anchors = starts + (spread * (ends - 1 - starts)).long()
        return self.ids[rows], anchors, self.ends[rows]


class Objective:
    """Loss and accuracy of a batch of blocks."""

    def __init__(self, target: Llama, model: FlashMapDraftModel) -> None:
        self.target, self.model = target, model
        with torch.no_grad():
            uniform, factor = model.target_constants(target.embedding)
        self.uniform, self.factor = uniform.clone(), factor.clone()

    def __call__(self, ids: Tensor, anchors: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Mean weighted cross-entropy, and mean number of leading slots that are right."""
        config, device = self.model.config, ids.device
        slots = torch.arange(1, config.block_size + 1, device=device)
        positions = anchors[..., None] + slots  # (B, N, K)
        flat = positions.flatten(1)
        labels = ids.gather(1, flat.clamp(max=ids.shape[1] - 1)).view(positions.shape)
        inside = positions < ends[:, None, None]

        count = anchors.numel()
        noise = torch.randn(count, config.block_size, config.target_hidden_size, device=device)
        noise = noise.to(self.factor.dtype) @ self.factor.T
        inputs = self.model.mix_state(self.uniform, noise, 0.0, 1.0)
        modulations = self.model.time_conditioning(0.0, 1.0)
        entries, mask = self._context(ids, anchors)
        hidden = self.model(inputs, modulations, positions.flatten(0, 1), entries, mask)
        logits = (hidden @ self.target.embedding.T).flatten(0, 1)

        losses = F.cross_entropy(logits.float(), labels.flatten(), reduction="none")
        weights = torch.exp(-(slots - 1) / 4.0) * inside
        loss = (losses.view(positions.shape) * weights).sum() / weights.sum()
        right = (logits.argmax(dim=-1).view(positions.shape) == labels) & inside
        return loss, right.long().cumprod(dim=-1).sum(dim=-1).float().mean()

    def _context(self, ids: Tensor, anchors: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Entries of all positions and of the anchors, and who may see which (B, 1, N K, T + N)."""
        batch, length = ids.shape
        times = torch.arange(length, device=ids.device).expand(batch, -1)
        taps = self.model.config.target_layer_ids
        context = self.model.context_entries(self.target.features(ids, taps), times)
        anchor_embeds = F.embedding(ids.gather(1, anchors), self.target.embedding)
        own = self.model.anchor_entries(anchor_embeds, anchors)
        entries = [
            (torch.cat((key, own_key), dim=2), torch.cat((value, own_value), dim=2))
            for (key, value), (own_key, own_value) in zip(context, own, strict=True)
        ]
        before = times[:, None, :] < anchors[..., None]
        mine = torch.eye(anchors.shape[1], dtype=torch.bool, device=ids.device)
        mask = torch.cat((before, mine.expand(batch, -1, -1)), dim=-1)
        return entries, mask.repeat_interleave(self.model.config.block_size, dim=1)[:, None]


class Optimizer:
    """AdamW on float32 masters of the model's weights, with a running average of them."""

    def __init__(self, model: FlashMapDraftModel, steps: int, rate: float) -> None:
        self.weights = list(model.parameters())
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        self.average = [master.clone() for master in self.masters]
        self.steps, self.peak = steps, rate
        self.rate = torch.tensor(rate, device=self.masters[0].device)
        on_gpu = self.rate.is_cuda
        self.adam = torch.optim.AdamW(
            self.masters,
            lr=self.rate if on_gpu else rate,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            capturable=on_gpu,
        )

    def schedule(self, step: int) -> None:
        """Set the rate of `step`: linear warm-up over 4 %, then a cosine to 2 %."""
        warm_up = max(1, self.steps // 25)
        share = 0.51 + 0.49 * math.cos(math.pi * min(1.0, step / self.steps))
        self.rate.fill_(self.peak * min(1.0, (step + 1) / warm_up) * share)

    def update(self) -> None:
        """Clip the gradients to norm 1, step the masters, and copy them back."""
        grads = [weight.grad.float() for weight in self.weights]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, 1.0 / norm.clamp(min=1.0))
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.adam.step()
        torch._foreach_lerp_(self.average, self.masters, 0.002)
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)


class Trainer:
    """Runs the steps; on a GPU a whole step, target and optimizer included, is one CUDA graph."""

    def __init__(self, target: Llama, data: Data, held_out: Data, args: argparse.Namespace) -> None:
        self.data, self.held_out, self.args = data, held_out, args
        device, dtype = target.embedding.device, target.embedding.dtype
        self.model = FlashMapDraftModel(CONFIG).to(device=device, dtype=dtype).train()
        with torch.no_grad():
            self.model.noise_gate.zero_()
        self.objective = Objective(target, self.model)
        self.optimizer = Optimizer(self.model, args.steps, args.rate)
        rows = torch.randint(len(data.ids), (args.steps, args.batch_size), device=device)
        self.rows = rows
        self.inputs = [part.clone() for part in data.batch(rows[0], args.blocks)]
        self.graph = self._capture() if device.type == "cuda" else None

    def step(self) -> tuple[Tensor, Tensor]:
        """One update on `self.inputs`."""
        for weight in self.model.parameters():
            weight.grad = None
        loss, accepted = self.objective(*self.inputs)
        loss.backward()
        self.optimizer.update()
        return loss.detach(), accepted

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.results = self.step()
        return graph

    def run(self) -> None:
        """Train, report, and save the averaged weights now and then."""
        started = saved = time.time()
        for index, rows in enumerate(self.rows):
            self.optimizer.schedule(index)
            for kept, new in zip(self.inputs, self.data.batch(rows, self.args.blocks), strict=True):
                kept.copy_(new)
            if self.graph is not None:
                self.graph.replay()
            else:
                self.results = self.step()
            now, last = time.time(), index == self.args.steps - 1
            if index % self.args.report == 0 or last:
                loss, accepted = (round(float(value), 4) for value in self.results)
                row = {"step": index, "loss": loss, "accepted": accepted}
                print(json.dumps({**row, "seconds": round(now - started)}), flush=True)
            if now - saved > self.args.save_seconds or last:
                saved = now
                self.save(index)

    @torch.no_grad()
    def save(self, index: int) -> None:
        """Write the averaged weights in bf16 and print how they do on held-out greedy answers."""
        weights = self.optimizer.weights
        current = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, self.optimizer.average)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randperm(len(self.held_out.ids), generator=generator)[:128]
        batches = [self.held_out.batch(part, 16) for part in rows.to(weights[0].device).split(32)]
        scores = torch.stack([torch.stack(self.objective(*batch)) for batch in batches])
        loss, accepted = (round(score, 4) for score in scores.mean(dim=0).tolist())
        row = {"step": index, "held_out_loss": loss, "held_out_accepted": accepted}
        print(json.dumps(row), flush=True)
        state = self.model.state_dict()
        state = {name: weight.to(torch.bfloat16) for name, weight in state.items()}
        self.model.save_pretrained(self.args.out, state_dict=state)
        torch._foreach_copy_(weights, current)


def main() -> None:
    """Train on the documents of DATA and write the drafter to OUT_FOLDER."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=9700)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=32, help="blocks an answer")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--report", type=int, default=400)
    parser.add_argument("--save-seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    documents = torch.load(args.data, weights_only=False)
    train = [document for document in documents if not document[2]]
    held_out = [document for document in documents if document[2] and document[3] == 0.0]
    target = Llama(args.target, device, dtype)
    Trainer(target, Data(train, device), Data(held_out, device), args).run()


if __name__ == "__main__":
    main()
