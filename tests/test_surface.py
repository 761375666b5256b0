"""Freezes what others script against: a change here needs a CHANGELOG entry."""

import importlib.metadata
import inspect
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
import typer

import flashmap
from flashmap.cli.main import app
from flashmap.modeling.request_flashmap import Settings

ROOT = Path(__file__).resolve().parents[1]
MODELS = {
    "--target", "--draft", "--device", "--dtype", "--num-steps", "--num-draws", "--num-candidates",
    "--adaptive", "--seed", "--json",
}  # fmt: skip
PUSH = {"--dry-run", "--pr", "--private", "--yes", "--json"}
OPTIONS = {
    "demo": {"--max-new-tokens", "--json"},
    "generate": MODELS
    | {"--max-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--raw"},
    "bench": MODELS | {"--max-new-tokens", "--temperature", "--prompts", "--repeats"},
    "doctor": {"--json"},
    "release build": {"--out", "--repo-id", "--tag", "--max-shard-size", "--json"},
    "release check": {"--target", "--acceptance", "--prompts", "--transformers", "--json"},
    "release card": {"--picture", "--json"},
    "release push": PUSH | {"--tag"},
    "release space": PUSH | {"--draft", "--target", "--folder"},
    "release kernels": PUSH | {"--version"},
    "release vocab": {"--target", "--corpus", "--out", "--processes", "--coverage", "--json"},
    "release grids": {"--vocab-size", "--steps", "--mode", "--json"},
    "release convert": {"--out", "--target", "--revision", "--license", "--json"},
    "train data": {"--set", "--device", "--json"},
    "train run": {"--set", "--seconds", "--cpu"},
    "train eval": {"--set", "--draft", "--loop", "--device", "--json"},
}
CONFIG_FIELDS = [
    "target_model", "target_hidden_size", "vocab_size", "target_layer_ids", "block_size",
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "cond_dim",
    "time_embed_dim", "time_scale", "rope_theta", "rms_norm_eps", "qk_norm_eps", "layer_norm_eps",
    "noise_gate", "time_schedule", "num_steps", "jump_grids",
]  # fmt: skip
SETTINGS = {
    "seed", "attention_mask", "top_k", "top_p", "min_p", "num_draws", "num_candidates",
    "jump_bank_size", "adaptive", "graphs", "past", "logits_processor", "stopping_criteria",
    "max_time", "stop_strings", "tokenizer",
}  # fmt: skip
SIGNATURES = {
    "spec_generate": "target input_ids max_new_tokens temperature num_steps stop_token_ids "
    "generator * streamer settings",
    "stream_generate": "target input_ids max_new_tokens temperature num_steps stop_token_ids "
    "generator settings",
    "flashmap_decoding": "input_ids logits_processor stopping_criteria generation_config * "
    "draft_model num_steps num_draws num_candidates jump_bank_size adaptive graphs seed past "
    "stop_strings tokenizer streamer model_kwargs",
    "draft": "anchor_ids cache embed_tokens lm_head num_steps noise generator * seed num_draws "
    "jump_bank_size",
    "extend_context": "cache target_hidden counts",
    "target_constants": "embedding",
    "embed_state": "state s t embedding",
    "mix_state": "posterior_embeds state_embeds s t",
    "time_conditioning": "s t",
    "select_target_hidden": "hidden_states",
    "target_features": "target",
    "check_target": "target",
    "heeds_noise": "num_steps",
    "new_past": "",
}


def written(function: Any) -> str:
    """Names of the parameters in order, without the first, a star before keyword-only ones."""
    names: list[str] = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return " ".join(names)


@pytest.mark.parametrize("name", SIGNATURES)
def test_methods_of_the_drafter(name: str) -> None:
    assert written(getattr(flashmap.FlashMapDraftModel, name)) == SIGNATURES[name]


def test_settings_that_go_by_keyword() -> None:
    assert typing.get_type_hints(Settings).keys() == SETTINGS


def test_the_cache_is_made_as_published() -> None:
    made = written(flashmap.FlashMapCache.__init__)
    assert made == "config batch_size max_length device dtype"


def test_the_fused_step_is_made_of_plain_arguments() -> None:
    from flashmap.modeling.select_flashmap import CHOICES, select_ops
    from flashmap.modeling.step_flashmap import DenseContext, FusedStep

    assert written(FusedStep.__init__) == (
        "model embedding lm_head max_length * num_steps token_ids kernels fp8_weights fold_noise "
        "jump_bank_size jump_topk"
    )
    assert written(FusedStep.hidden) == "context positions * seeds noise num_draws"
    assert written(FusedStep.write) == "context new anchors"
    assert written(DenseContext.__init__) == "step kv lengths"
    assert list(inspect.signature(select_ops).parameters) == ["device", "dtype", "choice"]
    assert CHOICES == ("auto", "eager", "triton")


def test_sizes_of_captured_rounds() -> None:
    from flashmap.modeling.graphs_flashmap import ROOMS

    assert ROOMS == (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def test_knobs_of_serving() -> None:
    from flashmap.serving.options import VARIABLE, DraftOptions

    assert VARIABLE == "FLASHMAP_OPTIONS"
    assert list(inspect.signature(DraftOptions).parameters) == [
        "num_steps", "draft_vocab_size", "kernels", "fp8_weights", "fold_noise",
        "fused_sampler", "jump_bank_size", "jump_topk", "tree_candidates", "tree_budget",
    ]  # fmt: skip


def test_what_is_hooked_in_vllm() -> None:
    from flashmap.serving.vllm_plugin.hooks import ENTRIES, HOOKS, VERSIONS

    assert list(VERSIONS) == ["0.31", "0.32", "0.33"]
    assert [hook.name for hook in HOOKS] == [
        "SpeculativeConfig.__post_init__",
        "EngineArgs.create_speculative_config",
        "EngineArgs._set_default_max_num_seqs_and_batched_tokens_args",
        "SpeculatorsConfig.build_vllm_speculative_config",
        "init_speculator",
    ]
    assert [entry.name for entry in ENTRIES] == [
        "_CONFIG_REGISTRY", "_SPECULATIVE_DECODING_CONFIGS", "SUPPORTED_SPECULATORS_TYPES",
    ]  # fmt: skip
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {
        "flashmap": "flashmap.serving.vllm_plugin.register:register"
    }


def test_what_is_hooked_in_sglang() -> None:
    from flashmap.serving.sglang_plugin.hooks import ENTRIES, HOOKS, VERSIONS, WORKER_HOOKS

    assert list(VERSIONS) == ["0.5.20", "0.5.21", "0.5.22", "0.5.23"]
    assert [hook.name for hook in (*HOOKS, *WORKER_HOOKS)] == [
        "_handle_dspark",
        "get_model_architecture",
        "build_draft_tp_worker",
        "DSparkWorkerV2.init_cuda_graphs",
        "DSparkWorkerV2._maybe_build_draft_sampler",
        "DSparkWorkerV2._forward_decode",
        "resolve_dflash_verify_mask_policy",
        "Scheduler._add_request_to_queue",
    ]
    assert [entry.name for entry in ENTRIES] == ["_CONFIG_REGISTRY"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {
        "flashmap": "flashmap.serving.sglang_plugin.register:register"
    }


def test_fields_of_the_configuration() -> None:
    names = written(flashmap.FlashMapConfig.__init__).split()
    assert names == [*CONFIG_FIELDS, "kwargs"]


def test_options_of_the_commands() -> None:
    found: dict[str, set[str]] = {}

    def walk(command: Any, words: list[str]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, [*words, name])
        if not hasattr(command, "commands"):
            options = {option for parameter in command.params for option in parameter.opts}
            found[" ".join(words)] = {option for option in options if option.startswith("--")}

    walk(typer.main.get_command(app), [])
    assert found == OPTIONS


def test_public_names() -> None:
    assert sorted(flashmap.__all__) == [
        "FlashMapCache",
        "FlashMapConfig",
        "FlashMapDraftModel",
        "FlashMapGenerateOutput",
        "__version__",
        "load_pair",
    ]


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in flashmap.__all__:
        assert getattr(flashmap, name) is not None
        assert name in dir(flashmap)


def test_distribution_name_and_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "flashmap-hub"
    assert project["scripts"] == {"flashmap": "flashmap.cli.main:main"}
    try:
        installed = importlib.metadata.version("flashmap-hub")
    except importlib.metadata.PackageNotFoundError:
        return  # run from the tree, without an installation
    assert installed == flashmap.__version__
