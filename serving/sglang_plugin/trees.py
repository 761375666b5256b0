"""A greedy round with a tree of drafts: candidates side by side, one pass of the target over the
tree that they share, and a commit that reorders slots instead of moving keys and values.

Legend: B requests, W nodes of a tree, its root (the anchor) included.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashmap.kernels.tree import Committed, Trees, commit_trees, triton_commit_trees

from .model import SglangDraftModel

# Attention backends of sglang that take a mask of their own for each verified token.
BACKENDS = ("TritonAttnBackend", "FlashInferAttnBackend")


def rounds(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DSparkWorkerV2._forward_decode`: a round of trees where the options ask for them."""

    @functools.wraps(original)
    def wrapped(self: Any, batch: Any, on_publish: Any, *args: Any, **kwargs: Any) -> Any:
        idle = batch.spec_info is None or batch.forward_mode.is_idle()
        if idle or not drafts_trees(self.draft_model):
            return original(self, batch, on_publish, *args, **kwargs)
        return tree_round(self, batch, on_publish)

    return wrapped


def masking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `resolve_dflash_verify_mask_policy`: verification of trees is captured with a mask."""

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        name, masked = original(*args, **kwargs)
        return name, masked or SglangDraftModel.masks_verification

    return wrapped


def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Scheduler._add_request_to_queue`: a request that trees cannot serve ends on arrival."""

    @functools.wraps(original)
    def wrapped(self: Any, req: Any, is_retracted: bool = False, *args: Any, **kwargs: Any) -> Any:
        worker = getattr(self, "draft_worker", None)
        if drafts_trees(getattr(worker, "draft_model", None)) and not is_retracted:
            refuse(req)
        return original(self, req, is_retracted, *args, **kwargs)

    return wrapped


def refuse(req: Any) -> None:
    """End a request that asks for more than greedy text, with the reason; the batch that it still
    joins once stays greedy."""
    sampling, asked = req.sampling_params, []
    if sampling.top_k > 1:
        asked.append("a temperature above 0")
    if req.return_logprob:
        asked.append("logprobs")
    grammars = ("json_schema", "regex", "ebnf", "structural_tag")
    asked += [name for name in grammars if getattr(sampling, name, None) is not None]
    if not asked or req.finished():
        return
    sampling.top_k = 1
    req.set_finish_with_abort(
        f"This server drafts trees (tree_candidates), which give greedy text only; the request asks"
        f" for {', '.join(asked)}. Send it without, or serve without tree_candidates."
    )


def drafts_trees(model: Any) -> bool:
    """Whether a draft model is ours and drafts trees."""
    return isinstance(model, SglangDraftModel) and model.options.tree_candidates > 0


def check_worker(worker: Any) -> None:
    """Raise ValueError unless a worker of a server of trees can verify them."""
    backend, size = type(worker.model_runner.attn_backend).__name__, worker.page_size
    if backend not in BACKENDS:
        raise ValueError(
            f"The target's attention backend is {backend}, which takes no mask from FlashMap's"
            " trees: give --attention-backend triton or flashinfer, or leave out tree_candidates."
        )
    if size != 1:
        raise ValueError(
            f"page_size is {size}, and trees are committed slot by slot: give --page-size 1, or"
            " leave out tree_candidates."
        )
    block = worker.draft_model.block_size
    if worker.gamma != block or block < 2:
        raise ValueError(
            f"Trees need whole blocks of at least 2 tokens, found {worker.gamma} of {block}: leave"
            " out --speculative-dspark-block-size, or tree_candidates."
        )


def tree_round(worker: Any, batch: Any, on_publish: Any) -> Any:
    """Draft, verify and commit a tree for each of the B requests of a batch."""
    from sglang.srt.managers.scheduler import GenerationBatchResult
    from sglang.srt.speculative.dspark_components.dspark_draft import make_next_draft_input
    from sglang.srt.speculative.dspark_components.dspark_planner import alloc_verify_window

    state, prefix, number = batch.spec_info, batch.seq_lens, len(batch.seq_lens)
    if prefix.is_cuda:
        prefix.record_stream(torch.cuda.current_stream())
    width: int = worker.verify_num_draft_tokens
    worker._observers.begin_step()
    window = alloc_verify_window(
        batch=batch,
        bs=number,
        device=worker.device,
        verify_num_draft_tokens=width,
        block_pos_offsets=worker._block_pos_offsets,
        model_runner=worker.model_runner,
    )
    drafted = worker._proposer._run_forward(
        batch=batch,
        draft_input=state,
        verify_window=window,
        bs=number,
        device=worker.device,
        embed_module=worker.draft_model.forward_embed,
        sampling_info=batch.sampling_info,
    )
    trees: Trees = worker.draft_model.trees(number)
    tokens = torch.cat((drafted.draft_block_ids[:, :1], trees.tokens), dim=1)
    positions = prefix.unsqueeze(1) + trees.depths
    result = _verify(worker, batch, state, window, tokens, positions, trees)
    logits_output = result.logits_output

    best = logits_output.next_token_logits.argmax(dim=-1).view(number, width)
    committed = _commit(worker, batch, trees, best, window.verify_cache_loc_2d)
    new_lens = prefix + committed.lengths
    if on_publish is not None:
        on_publish(new_lens)
    worker._kv_injector.inject_target_hidden(
        target_hidden=logits_output.hidden_states.flatten(0, -2),
        cache_loc=committed.slots.flatten(),
        positions=positions.flatten(),
    )
    logits_output.hidden_states = None
    return GenerationBatchResult(
        logits_output=logits_output,
        next_token_ids=committed.tokens.flatten(),
        accept_lens=committed.lengths,
        block_accept_lens=committed.lengths,
        can_run_cuda_graph=result.can_run_cuda_graph,
        next_draft_input=make_next_draft_input(bonus_tokens=committed.bonus, new_seq_lens=new_lens),
        speculative_num_draft_tokens=width,
        new_seq_lens=new_lens,
    )


def _verify(
    worker: Any,
    batch: Any,
    state: Any,
    window: Any,
    tokens: Tensor,
    positions: Tensor,
    trees: Trees,
) -> Any:
    """One pass of the target over nodes `tokens` (B, W) at `positions` (B, W)."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments

    width = tokens.shape[1]
    lengths, total = batch.seq_lens_cpu, batch.seq_lens_sum
    known = state.nxt_kv_lens_cpu if lengths is None else lengths
    verify_input = DFlashVerifyInput(
        draft_token=tokens.flatten(),
        positions=positions.flatten(),
        draft_token_num=width,
        custom_mask=full_mask(trees.visible, batch.seq_lens, int(known.sum())),
        capture_hidden_mode=CaptureHiddenMode.FULL,
        live_seq_lens_cpu=lengths,
    )
    batch.out_cache_loc = window.verify_cache_loc
    executor = worker._verify_executor
    if lengths is None:
        batch.seq_lens_cpu, batch.seq_lens_sum = known, int(state.nxt_kv_lens_sum)
    elif not executor._verify_backend_self_adds_seq_lens():
        batch.seq_lens_cpu = lengths + width
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    result = executor._forward_prepared_verify(
        batch=batch,
        verify_input=verify_input,
        seq_lens_cpu_backup=lengths,
        seq_lens_sum_backup=total,
    )
    if batch.sampling_info is not None:
        apply_dflash_verify_logits_adjustments(
            next_token_logits=result.logits_output.next_token_logits,
            sampling_info=batch.sampling_info,
            draft_token_num=width,
        )
    return result


def full_mask(visible: Tensor, prefix: Tensor, total: int) -> Tensor:
    """The mask that sglang's backends take: W rows of prefix[b] + W entries for each request, one
    request after the other, the prefix open to every node; `visible` is bool (B, W, W), `total` the
    sum of `prefix` (B), or more."""
    number, width = visible.shape[:2]
    mask = torch.ones(width * (total + number * width), dtype=torch.bool, device=prefix.device)
    row = (prefix + width).long()
    begin = (width * row).cumsum(dim=0) - width * row
    nodes = torch.arange(width, device=prefix.device)
    at = begin[:, None, None] + nodes[:, None] * row[:, None, None] + prefix[:, None, None] + nodes
    mask[at] = visible
    return mask


def _commit(worker: Any, batch: Any, trees: Trees, best: Tensor, slots: Tensor) -> Committed:
    """Commit in sglang's table. Its scheduler waits for the event before it frees what texts that
    have ended left there, which it does while this round runs."""
    commit = triton_commit_trees if best.is_cuda else commit_trees
    table = worker.model_runner.req_to_token_pool.req_to_token
    committed = commit(trees, best, slots, batch.seq_lens, batch.req_pool_indices, table)
    if best.is_cuda:
        event = torch.cuda.Event()
        event.record()
        worker.last_shared_read_runner.shared_read_done_event = event
    return committed
