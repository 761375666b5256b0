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

    def test_no_rows(self) -> None:
        refused(r"\(0, 3\)", ids=torch.zeros(0, 3, dtype=torch.long))

    def test_three_dimensions(self) -> None:
        refused(r"\(1, 2, 3\)", ids=torch.zeros(1, 2, 3, dtype=torch.long))

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

    def test_beyond_the_vocabulary_in_the_second_row(self) -> None:
        refused(rf"\b{VOCAB + 6}\b", ids=torch.tensor([[1, 2], [3, VOCAB + 6]]))


class TestMask:
    IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])

    @pytest.mark.parametrize("shape", [(2, 3), (1, 4), (4,), (2, 1, 1, 4)])
    def test_another_shape(self, shape: tuple[int, ...]) -> None:
        found = re.escape(str(shape))
        refused(
            "attention_mask", found, r"\(2, 4\)", ids=self.IDS, attention_mask=torch.ones(shape)
        )

    def test_a_list(self) -> None:
        refused("attention_mask is list", ids=self.IDS, attention_mask=[[1, 1, 1, 1]] * 2)

    @pytest.mark.parametrize("row", [[1, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1]])
    def test_padding_in_the_middle(self, row: list[int]) -> None:
        mask = torch.tensor([[0, 1, 1, 1], row])
        refused("attention_mask", "middle of prompt 1", ids=self.IDS, attention_mask=mask)

    def test_a_row_that_is_all_padding(self) -> None:
        mask = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
        refused("Prompt 1 is empty", ids=self.IDS, attention_mask=mask)
        refused("The prompt is empty", ids=self.IDS[:1], attention_mask=mask[1:])

    @pytest.mark.parametrize("value", [2.0, -1.0, float("-inf"), float("nan"), 0.5])
    def test_values_that_say_neither(self, value: float) -> None:
        mask = torch.tensor([[value, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
        refused(
            "attention_mask holds other values", "1 for a token", ids=self.IDS, attention_mask=mask
        )

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
    def test_any_number_type_will_do(self, dtype: torch.dtype) -> None:
        mask = torch.tensor([[0, 0, 1, 1]]).to(dtype)
        target, ids = toys.llama(), torch.tensor([[-100, VOCAB + 9, 3, 4]])  # what padding is
        out = toys.drafter().spec_generate(target, ids, 6, attention_mask=mask)
        assert toys.text_of(out, ids) == toys.greedy(target, ids[:, 2:], 6)


class TestBatch:
    IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])

    @pytest.mark.parametrize("make", [toys.gemma2, toys.gemma3])
    def test_of_a_target_with_windows(self, make: Any) -> None:
        target = make()
        refused("holds 2 prompts", "sliding_attention", "one prompt", target=target, ids=self.IDS)
        assert toys.drafter().spec_generate(target, self.IDS[:1], 4).num_new_tokens == 4

    @pytest.mark.parametrize(
        "make",
        [
            toys.qwen3_next, toys.lfm2, toys.falcon_h1, toys.mamba, toys.mamba2, toys.rwkv,
            toys.jamba, toys.recurrent_gemma,
        ],
    )  # fmt: skip
    def test_of_a_target_with_recurrent_layers(self, make: Any) -> None:
        # Those that cannot be rolled back at all say that first.
        refused("holds 2 prompts|roll back|rolled-back", target=make(), ids=self.IDS)

    def test_a_streamer(self) -> None:
        class Streamer:
            ends = 0

            def put(self, value: Any) -> None:
                raise AssertionError("nothing can be shown")

            def end(self) -> None:
                self.ends += 1

        streamer = Streamer()
        refused("streamer", "holds 2", ids=self.IDS, streamer=streamer)
        assert streamer.ends == 1

    def test_a_stream(self) -> None:
        with pytest.raises(ValueError, match=r"stream_generate shows one sequence.*holds 2"):
            toys.drafter().stream_generate(toys.llama(), self.IDS)

    def test_the_longest_prompt_decides_whether_the_positions_suffice(self) -> None:
        target, mask = toys.gpt2(positions=16), torch.tensor([[0, 0, 1], [1, 1, 1]])
        refused("3 prompt tokens", "16 positions", target=target, ids=self.IDS, max_new_tokens=14)
        found = toys.drafter().spec_generate(target, self.IDS, 13, attention_mask=mask)
        assert found.num_new_tokens == [13, 13]

    @pytest.mark.parametrize("seed", [[1], [1, 2, 3]])
    def test_another_number_of_seeds(self, seed: list[int]) -> None:
        refused(f"{len(seed)} values for 2 sequences", ids=self.IDS, seed=seed)


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 5), ("top_p", 0.9), ("top_p", 0.0), ("min_p", 0.1)]
)
def test_truncations_of_greedy_text(name: str, value: Any) -> None:
    refused(f"{name}={value}", "temperature", **{name: value})
    refused(f"{name}={value}", "temperature", temperature=0, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -1), ("top_k", 2.5), ("top_k", "3"), ("top_p", -0.1), ("top_p", 1.5),
        ("top_p", "much"), ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 1.5),
        ("min_p", float("nan")),
    ],
)  # fmt: skip
def test_truncations_out_of_their_range(name: str, value: Any) -> None:
    refused(re.escape(f"{name}={value!r}"), temperature=1.0, **{name: value})


@pytest.mark.parametrize(("name", "value"), [("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)])
def test_truncations_that_leave_everything(name: str, value: Any) -> None:
    target, drafter = toys.llama(), toys.drafter()
    free = drafter.spec_generate(target, prompt(5), 12, temperature=1.0, seed=1)
    same = drafter.spec_generate(target, prompt(5), 12, temperature=1.0, seed=1, **{name: value})
    assert same.sequences.equal(free.sequences)


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
    refused("generator is a int, expected a torch.Generator", generator=5)


@pytest.mark.parametrize("name", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("value", [5, [5], transformers.TemperatureLogitsWarper(0.5)])
def test_processors_and_criteria_that_are_no_list(name: str, value: Any) -> None:
    refused(f"{name}=.*pass a list", **{name: value})


def test_no_streamer_and_no_tokenizer() -> None:
    refused("streamer is a int, expected an object with put and end", streamer=5)
    refused("needs the target's tokenizer", stop_strings="a", tokenizer="smollm2")


class TestTarget:
    @pytest.mark.parametrize("target", [None, "smollm2-135m", toys.drafter()])
    def test_no_target(self, target: Any) -> None:
        with pytest.raises(ValueError, match=r"target is a \w+, expected the causal"):
            toys.drafter().spec_generate(target, prompt(5))

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
