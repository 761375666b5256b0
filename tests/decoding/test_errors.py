"""What a user can get wrong raises one ValueError that says what was found, with values."""

import re
from typing import Any

import pytest
import torch
import transformers
from support import toys
from support.toys import VOCAB, prompt


def refused(
    *fragments: str, target: Any = None, drafter: Any = None, ids: Any = None, **arguments: Any
) -> None:
    """Check that the call raises ValueError with all of these fragments, in one sentence or two."""
    target = toys.llama() if target is None else target
    drafter = toys.drafter() if drafter is None else drafter
    with pytest.raises(ValueError) as caught:
        drafter.spec_generate(target, prompt(5) if ids is None else ids, **arguments)
    message = str(caught.value)
    for fragment in fragments:
        assert re.search(fragment, message), (fragment, message)
    assert "\n" not in message
    assert toys.hook_count(target) == 0


class TestPrompt:
    def test_empty(self) -> None:
        refused("empty", ids=torch.empty(1, 0, dtype=torch.long))

    def test_two_rows(self) -> None:
        refused(r"\(2, 3\)", ids=torch.zeros(2, 3, dtype=torch.long))

    def test_one_dimension(self) -> None:
        refused(r"\(3,\)", ids=torch.zeros(3, dtype=torch.long))

    def test_floats(self) -> None:
        refused("float32", ids=torch.zeros(1, 3))

    def test_booleans(self) -> None:
        refused("bool", ids=torch.ones(1, 3, dtype=torch.bool))

    def test_a_list(self) -> None:
        refused("list", ids=[[1, 2, 3]])

    def test_below_zero(self) -> None:
        refused(r"-4\b", rf"\b{VOCAB - 1}\b", ids=torch.tensor([[1, -4, 2]]))

    def test_beyond_the_vocabulary(self) -> None:
        refused(rf"\b{VOCAB}\b", rf"\b{VOCAB - 1}\b", ids=torch.tensor([[1, VOCAB]]))


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "7", None])
def test_max_new_tokens(value: Any) -> None:
    refused("max_new_tokens", re.escape(repr(value)), max_new_tokens=value)


@pytest.mark.parametrize(
    "value", [-0.5, float("nan"), float("inf"), -float("inf"), 1e-38, "1", True]
)
def test_temperature(value: Any) -> None:
    refused("temperature", re.escape(repr(value)), temperature=value)


@pytest.mark.parametrize("value", [5, 9, -1])
def test_num_steps_without_a_grid(value: int) -> None:
    refused(f"num_steps={value}", "1, 2, 3, 4", num_steps=value)


def test_steps_are_listed_in_the_order_of_numbers() -> None:
    grids = {str(n): [i / n for i in range(n + 1)] for n in (1, 2, 10)}
    refused("1, 2, 10", drafter=toys.drafter(jump_grids=grids), num_steps=3)


@pytest.mark.parametrize("seed", [True, "7", 1.5, [1, 2], [], [True], [1.0]])
def test_seed(seed: Any) -> None:
    refused("seed", seed=seed)


def test_seed_and_generator() -> None:
    refused("seed and generator", seed=1, generator=torch.Generator())


class TestTarget:
    def test_another_hidden_size(self) -> None:
        refused(r"\b24\b", "target_hidden_size=32", drafter=toys.drafter(target_hidden_size=32))

    def test_taps_deeper_than_the_target(self) -> None:
        drafter = toys.drafter(target_layer_ids=[0, 3])
        refused(r"\[0, 3\]", "at least 4", "has 3", drafter=drafter)

    def test_encoder_and_decoder(self) -> None:
        config = transformers.T5Config(
            vocab_size=VOCAB, d_model=toys.WIDTH, d_kv=8, d_ff=16, num_layers=3, num_heads=2,
            decoder_start_token_id=0,
        )  # fmt: skip
        refused("encoder-decoder", target=transformers.T5ForConditionalGeneration(config).eval())

    def test_a_model_without_a_vocabulary_head(self) -> None:
        refused("vocabulary head", target=toys.llama().model)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_weights_of_nan(self, temperature: float) -> None:
        target = toys.llama()
        with torch.no_grad():
            target.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
        refused("NaN", target=target, temperature=temperature)

    def test_an_embedding_of_nan(self) -> None:
        target = toys.llama()
        with torch.no_grad():
            target.model.embed_tokens.weight[VOCAB - 1] = float("nan")  # not in the prompt
        refused("NaN", target=target, ids=torch.tensor([[1, 2, 3]]))

    def test_a_narrow_vocabulary_head(self) -> None:
        target = toys.llama()
        target.lm_head = torch.nn.Linear(toys.WIDTH, VOCAB - 2, bias=False)
        refused(rf"\b{VOCAB - 2} logits", rf"\b{VOCAB}\b", target=target, max_new_tokens=8)


def test_another_models_name_is_one_warning_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    target = toys.llama()
    target.config._name_or_path = "somebody/Other-Model"
    drafter = toys.drafter(target_model="maker/Trained-For-9B")
    for _ in range(2):
        drafter.check_target(target)
    warned = [record.getMessage() for record in caplog.records if "Other-Model" in record.msg]
    assert len(warned) == 1
    assert "maker/Trained-For-9B" in warned[0]
    target.config._name_or_path = "/models/trained-for-9b/"
    caplog.clear()
    drafter.check_target(target)
    assert not caplog.records


@pytest.mark.parametrize("value", ["</s>", [1, "2"], 1.5])
def test_stop_tokens(value: Any) -> None:
    refused("stop_token_ids", stop_token_ids=value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_a_later_pass(temperature: float) -> None:
    target, passes = toys.llama(), []

    def spoil(module: Any, args: Any, output: Any) -> Any:
        passes.append(1)
        return output * float("nan") if len(passes) == 3 else output

    target.lm_head.register_forward_hook(spoil)
    with pytest.raises(ValueError, match="logits hold NaN"):
        TargetOnly().spec_generate(target, prompt(5), max_new_tokens=24, temperature=temperature)


class TargetOnly(toys.Scripted):
    """Drafts without touching the target's head."""

    def __init__(self) -> None:
        super().__init__(toys.drafter_config())

    def draft(self, anchor_ids: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(1, self.config.block_size, VOCAB)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_changes_with_length(kind: str) -> None:
    target = toys.scaled_rope(kind, 24)
    refused("24 positions.*rotary", target=target, ids=prompt(10), max_new_tokens=15)
    ids = prompt(10)
    out = toys.drafter().spec_generate(target, ids, max_new_tokens=14)
    assert toys.text_of(out, ids) == toys.greedy(target, ids, 14)


def test_an_encoder_that_sees_later_tokens() -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": toys.WIDTH, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, num_hidden_layers=3, num_attention_heads=2)
    target = transformers.BertLMHeadModel(config).eval()
    refused("BertLMHeadModel", "is_decoder=True", target=target)


def test_batches_that_do_not_match() -> None:
    drafter, target = toys.drafter(), toys.llama()
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    cache = drafter.new_cache(2, 8)
    with pytest.raises(ValueError, match=r"2 sequences and 1"):
        drafter.extend_context(cache, torch.zeros(1, 3, 2 * toys.WIDTH))
    with pytest.raises(ValueError, match=r"2 sequences and 1"):
        drafter.draft(torch.tensor([1]), cache, *modules)
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        drafter.draft(torch.tensor([[1, 2]]), cache, *modules)
