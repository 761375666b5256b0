"""The training loop: documents in, a drafter out.

Everything random in a step is a function of the run's seed, the step and the shard, and the data
order of the seed and the epoch. So a run that was killed goes on exactly where its checkpoint
stands, and a step gives the same gradient however many processes share its shards.

On a GPU a shard's passes through the target and the drafter and back are one CUDA graph.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from flashmap.modeling.modeling_flashmap import FlashMapDraftModel
from flashmap.modeling.target_flashmap import decoder_layers, forwards
from flashmap.quiet import quiet

from .blocks import Blocks, Target, draw_blocks
from .checkpoints import (
    checkpoint_path,
    damaged,
    newest_checkpoint,
    save_checkpoint,
    seed_of,
    seeded,
)
from .documents import Documents
from .log import Log
from .objectives import Result
from .optimizer import Optimizer
from .recipe import Recipe
from .setup import make_objective
from .walk import Walk, walk

if TYPE_CHECKING:
    from accelerate import Accelerator

WARM_UP_STEPS = 3
HELD_OUT_DOCUMENTS = 64
ROWS, NUM_VALUES = "rows", 5  # loss, cross-entropy, two lengths and the gradient's norm of a step
ANCHORS, NOISE = 1, 2  # what a step's random numbers are for


class Trainer:
    """One run of a recipe.

    Args:
        recipe: what to do.
        target: the frozen target, on the accelerator's device in the run's dtype.
        model: the drafter, there too.
        teacher: the stage-1 drafter, for distillation.
        documents: training and held-out documents.
        accelerator: the processes and their device.
        report: gets a line of text now and then.

    Raises:
        ValueError: the shards cannot be shared by the processes, or there is nothing to learn from.
        TrainingError: the loss is not finite, the drafter says the same everywhere, or the disk is
            full.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        model: FlashMapDraftModel,
        teacher: FlashMapDraftModel | None,
        documents: Documents,
        accelerator: "Accelerator",
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        run, device = recipe.run, accelerator.device
        if run.num_shards % accelerator.num_processes:
            raise ValueError(
                f"run.num_shards is {run.num_shards}, which {accelerator.num_processes} processes"
                " cannot share evenly: give a multiple."
            )
        training = documents.select(~documents.held_out)
        if not len(training):
            raise ValueError(f"{recipe.data.folder} holds no document to train on.")
        self.recipe, self.target, self.model = recipe, target, model.train()
        self.accelerator, self.report = accelerator, report
        self.held_out = documents.select(documents.held_out)
        self.documents = training.to(device)
        self.objective = make_objective(recipe.loss, model, target, teacher, run)
        self.optimizer = Optimizer(model, run)
        self.folder = Path(run.folder)
        self.checkpoints, self.drafter = self.folder / "checkpoints", self.folder / "drafter"
        self.log = Log(self.folder, accelerator.is_main_process)
        # One layer is compiled for all. Evaluation, whose shapes vary, does without.
        layers = list(decoder_layers(target.model))
        self.compiled = [(layer, torch.compile(layer.forward)) for layer in layers if run.compile]
        self.orders: dict[int, Tensor] = {}
        self.rows: list[Tensor] = []
        self.inputs: Blocks | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Result | None = None

    # A step

    def blocks(self, step: int, shard: int) -> Blocks:
        """The documents and anchors of one shard of a step."""
        run = self.recipe.run
        size = run.batch_size // run.num_shards
        first = step * run.batch_size + shard * size
        generator = seeded(
            seed_of(self.recipe.seed, ANCHORS, step, shard), self.documents.tokens.device
        )
        rows = self._rows(first, size)
        return draw_blocks(self.documents, rows, run.blocks, run.max_length, generator)

    def _rows(self, first: int, count: int) -> Tensor:
        """Indices of the documents number `first` to `first + count` of the run's order."""
        size = len(self.documents)
        last = (first + count - 1) // size
        parts = []
        for epoch in range(first // size, last + 1):
            start = max(first - epoch * size, 0)
            parts.append(self._order(epoch)[start : first + count - epoch * size])
        return torch.cat(parts)

    def _order(self, epoch: int) -> Tensor:
        """The documents in an epoch's order, on the device: a copy in every step would wait for
        the step before."""
        if epoch not in self.orders:
            generator = seeded(seed_of(self.recipe.seed, epoch), torch.device("cpu"))
            order = torch.randperm(len(self.documents), generator=generator)
            self.orders = {epoch: order.to(self.documents.tokens.device)}
        return self.orders[epoch]

    def passes(self, blocks: Blocks) -> Result:
        """Forward and backward; gradients are added to what is there."""
        with forwards(self.compiled):
            features, logits = self.target.read(
                self.model, blocks.ids, logits=self.objective.needs_target_logits
            )
        result = self.objective(blocks, features, logits)
        (result.loss / self._local_shards()).backward()
        return Result(result.loss.detach(), result.stats.detach())

    def _local_shards(self) -> int:
        return self.recipe.run.num_shards // int(self.accelerator.num_processes)

    def shard(self, step: int, shard: int) -> Result:
        """`passes` of one shard, with its own noise."""
        blocks = self.blocks(step, shard)
        seed = seed_of(self.recipe.seed, NOISE, step, shard)
        if blocks.ids.is_cuda:
            if self.graph is None:
                self._capture(blocks)
            assert self.inputs is not None and self.graph is not None and self.result is not None
            for kept, new in zip(self.inputs, blocks, strict=True):
                kept.copy_(new)
            torch.cuda.manual_seed(seed)
            self.graph.replay()
            return Result(self.result.loss.clone(), self.result.stats.clone())
        torch.manual_seed(seed)
        return self.passes(blocks)

    def _capture(self, blocks: Blocks) -> None:
        self.inputs = Blocks(*(part.clone() for part in blocks))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self.passes(self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.take_gradients()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self.passes(self.inputs)
        self.optimizer.take_gradients()

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """One update; gives loss and statistics (4) and the gradient's norm."""
        count, index = self.accelerator.num_processes, self.accelerator.process_index
        shards = range(index, self.recipe.run.num_shards, count)
        gradients: Tensor | None = None
        values = []
        for shard in shards:
            result = self.shard(step, shard)
            values.append(torch.cat((result.loss[None].float(), result.stats)))
            taken = self.optimizer.take_gradients()
            gradients = taken if gradients is None else gradients.add_(taken)
        assert gradients is not None
        means = torch.stack(values).mean(dim=0)
        flat = torch.cat((gradients, means))
        if count > 1:
            flat = self.accelerator.reduce(flat, "mean")
        return flat[-len(means) :], self.optimizer.update(step, flat[: -len(means)])

    # The run

    def run(self, seconds: float = math.inf) -> int:
        """Train from the newest checkpoint to the last step, or for about this long; gives the
        number of steps done."""
        try:
            return self._run(seconds)
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"{self.folder} cannot be written to ({error}): make room, and run again; it goes"
                " on from the last whole checkpoint."
            ) from error

    def _run(self, seconds: float) -> int:
        run, started = self.recipe.run, time.monotonic()
        step: int = self._resume()
        saved = clock = started
        (over,) = self._agreed(seconds <= 0)
        if over and not checkpoint_path(self.checkpoints, step).is_dir():
            self.save(step)
        while step < run.steps and not over:
            values, norm = self.step(step)
            self.rows.append(torch.cat((values, norm[None])))
            step += 1
            last = step == run.steps
            if step % run.log_every == 0 or last:
                now = time.monotonic()
                self._record(step, now - clock)
                clock = now
            if step % run.evaluate_every == 0 or last:
                self._evaluate(step)
            now = time.monotonic()
            due, over = self._agreed(now - saved > run.save_every, now - started >= seconds)
            if due or last or over:
                self.save(step)
                saved = time.monotonic()
        return step

    def _agreed(self, *answers: bool) -> list[bool]:
        """Whether any process says so, the same in all of them: their clocks differ."""
        if self.accelerator.num_processes == 1:
            return list(answers)
        flags = torch.tensor([float(answer) for answer in answers], device=self.accelerator.device)
        total = self.accelerator.reduce(flags, "sum")
        return [count > 0 for count in total.tolist()]

    def _resume(self) -> int:
        found = newest_checkpoint(self.checkpoints, self.recipe)
        step = 0
        if found is not None:
            step, tensors = found
            try:
                self.rows = list(tensors.pop(ROWS).to(self.accelerator.device))
                self.optimizer.load(tensors, step)
            except (KeyError, ValueError) as error:
                raise damaged(checkpoint_path(self.checkpoints, step), error) from error
            self.report(f"going on from step {step}")
            self._write_drafter()  # a kill may have come between the checkpoint and it
        self.log.forget_after(step)
        return step

    def _record(self, step: int, seconds: float) -> None:
        """Log the means since the last row; `seconds` is how long they took in this process."""
        count = len(self.rows)
        loss, nll, greedy, sampled, norm = torch.stack(self.rows).mean(dim=0).tolist()
        self.rows = []
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingError(
                f"the loss is {loss} and the gradient's norm {norm} between steps {step - count}"
                f" and {step}. {self._way_back()}, with a lower run.rate or run.clip."
            )
        run, block = self.recipe.run, self.model.config.block_size
        slots = count * run.batch_size * run.blocks * self.objective.num_draws * block
        self.log.add(
            {
                "step": step,
                "loss": loss,
                "cross_entropy": nll,
                "leading_greedy": greedy,
                "leading_sampled": sampled if sampled >= 0 else None,
                "gradient_norm": norm,
                "rate": self.optimizer.rate(step - 1),
                "slots_per_second": slots / seconds,
            }
        )
        self.report(f"step {step}: loss {loss:.3f}, {slots / seconds / 1e3:.0f} thousand slots/s")

    def _evaluate(self, step: int) -> None:
        """Acceptance on held-out documents under the averaged weights; stops a collapsed run."""
        row: dict[str, Any] = {"step": step}
        temperatures = self.held_out.temperatures
        with self.optimizer.averaged():
            self.model.eval()
            for temperature in (0.0, 1.0):
                chosen = (temperatures == temperature).nonzero()[:HELD_OUT_DOCUMENTS, 0]
                if len(chosen):
                    documents = self.held_out.select(chosen)
                    found = walk(self.model, self.target, documents, temperature=temperature)
                    row[f"acceptance_length_{temperature:.0f}"] = found.acceptance_length
                    self._refuse_collapse(step, found)
            self.model.train()
        self.log.add(row)
        self.report(json.dumps(row))

    def _refuse_collapse(self, step: int, found: Walk) -> None:
        said, wanted = found.distinct_first
        if step >= self.recipe.run.collapse_after and wanted >= 10 and said <= max(1, wanted // 50):
            raise TrainingError(
                f"the drafter has collapsed by step {step}: {said} different tokens in the first"
                f" slot of {found.num_rounds} held-out blocks, where the target says {wanted}."
                " Start again in another run.folder, with a lower run.rate or another loss."
            )

    def save(self, step: int) -> None:
        """Write a checkpoint, the averaged drafter and the plot."""
        if not self.accelerator.is_main_process:
            return
        state = self.optimizer.state()
        if not all(bool(torch.isfinite(tensor).all()) for tensor in state.values()):
            raise TrainingError(
                f"the weights are not finite at step {step}. {self._way_back()}, with a lower"
                " run.rate."
            )
        # Steps that no row of the log covers yet go along.
        state[ROWS] = torch.stack(self.rows) if self.rows else torch.zeros(0, NUM_VALUES)
        save_checkpoint(self.checkpoints, self.recipe, step, state)
        self._write_drafter()
        self.log.plot()

    def _write_drafter(self) -> None:
        if not self.accelerator.is_main_process:
            return
        weights = self.optimizer.averages()
        with quiet():
            self.model.save_pretrained(
                self.drafter,
                state_dict={name: weight.to(torch.bfloat16) for name, weight in weights.items()},
                max_shard_size=self.recipe.run.shard_size,
            )

    def _way_back(self) -> str:
        """How to begin again with another recipe, which a run's own checkpoints refuse."""
        kept = (self.drafter / "config.json").is_file()
        last = f" from its last good weights, run.start = '{self.drafter}'" if kept else ""
        return f"Start again in another run.folder{last}"


class TrainingError(RuntimeError):
    """A run that cannot go on; the message says what to do."""
