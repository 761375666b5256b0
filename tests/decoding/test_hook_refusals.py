"""What `generate(custom_generate=flashmap_decoding)` cannot honour is named in one sentence."""

from typing import Any

import pytest
import torch
import transformers
from support import toys
from support.hooked import LENGTH, generate, hooked, single, target
from support.toys import hook_count, prompt

from flashmap.modeling.hook_flashmap import flashmap_decoding

REFUSED: dict[str, dict[str, Any]] = {
    "num_beams=2": {"num_beams": 2},
    "num_return_sequences=2": {"num_return_sequences": 2, "do_sample": True},
    "penalty_alpha=0.6": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers='low'": {"dola_layers": "low"},
    "prompt_lookup_num_tokens=3": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit=1": {"assistant_early_exit": 1},
    "guidance_scale=1.5": {"guidance_scale": 1.5},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "output_attentions=True": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states=True": {"output_hidden_states": True, "return_dict_in_generate": True},
    "past is a str": {"past": "x"},
    "or pass past=draft.new_past()": {"past_key_values": transformers.DynamicCache()},
    "position_ids are not": {"position_ids": torch.arange(1, LENGTH + 1)[None]},
    "num_draws=0": {"num_draws": 0},
    "num_candidates=0": {"num_candidates": 0},
    "num_candidates=2 verifies a tree": {"num_candidates": 2, "do_sample": True},
    "adaptive='often'": {"adaptive": "often"},
    "num_steps": {"num_steps": 9},
    "seed": {"seed": "x"},
    "draft_model is a str": {"draft_model": "smollm2-135m"},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_honoured_is_named(named: str) -> None:
    settings = {"draft_model": toys.drafter(), "custom_generate": flashmap_decoding}
    with pytest.raises(ValueError) as caught:
        generate(single(), **{**settings, **REFUSED[named]})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hook_count(target()) == 0


def test_a_missing_drafter_is_named() -> None:
    with pytest.raises(ValueError, match="draft_model is missing, expected a FlashMap drafter"):
        generate(single(), custom_generate=flashmap_decoding)


def test_embeddings_in_the_place_of_tokens_are_refused() -> None:
    embeds = target().get_input_embeddings()(prompt(LENGTH)).detach()
    with pytest.raises(ValueError, match="inputs_embeds: flashmap_decoding runs the target on"):
        hooked({"inputs_embeds": embeds})


@pytest.mark.parametrize(("size", "refused"), [(1, False), (2, True)])
def test_weights_shared_among_processes_are_refused(
    size: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *args: size)
    if refused:
        with pytest.raises(ValueError, match="synced_gpus: the weights are shared among several"):
            hooked(single(), synced_gpus=True)
    else:
        assert hooked(single(), synced_gpus=True).shape[1] > LENGTH


class TestAssistant:
    @pytest.mark.parametrize("sample", [False, True])
    def test_a_drafter_says_what_to_call_instead(self, sample: bool) -> None:
        with pytest.raises(ValueError, match=r"custom_generate=draft\.flashmap_decoding"):
            generate(single(), assistant_model=toys.drafter(), do_sample=sample)

    def test_it_is_refused_beside_the_callable(self) -> None:
        with pytest.raises(ValueError, match="assistant_model does not go with"):
            hooked(single(), assistant_model=toys.drafter())

    def test_the_guard_is_in_nobodys_way(self, tmp_path: Any) -> None:
        drafter = toys.drafter()
        assert drafter.generation_config.eos_token_id is None
        assert not drafter.can_generate()
        drafter.save_pretrained(tmp_path)
        assert not (tmp_path / "generation_config.json").exists()
        again = type(drafter).from_pretrained(tmp_path)
        assert again.state_dict().keys() == drafter.state_dict().keys()
