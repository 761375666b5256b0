"""Each way of breaking a release is found by exactly the check that is meant for it, and no other
tells of it too."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.damage import (
    Break,
    append,
    both,
    case_twins,
    config,
    instead,
    no_utf8,
    other_picture,
    ranking,
    record,
    remove,
    rename_shard,
    replace,
    sharded,
    swap_first_two,
    target_folder,
    torch_archive,
    weights,
    write,
)
from support.pair_folders import edit_json, truncate
from support.releases import check_statically, failures, setting

from flashmap.release.contents import GENERATE

TOKEN = "hf_" + "a1B2" * 9
MODELING, LAYERS = "modeling_flashmap.py", "layers_flashmap.py"

FILES: dict[str, tuple[Break, str]] = {
    "no licence": (remove("LICENSE"), "files"),
    "no configuration": (remove("config.json"), "files"),
    "no card": (remove("README.md"), "files"),
    "no record": (remove("release.json"), "files"),
    "no golden outputs": (remove("eval/golden.json"), "files"),
    "licence is a link": (
        lambda f: [shutil.move(f / "LICENSE", f.parent / "L"), (f / "LICENSE").symlink_to("../L")],
        "links",
    ),
    "broken link": (lambda f: (f / "gone.py").symlink_to("nowhere"), "links"),
    "pipe": (lambda f: os.mkfifo(f / "pipe.safetensors"), "links"),
    "code is a pipe": (instead(LAYERS, os.mkfifo), "links"),
    "record is a pipe": (instead("release.json", os.mkfifo), "links"),
    "configuration is a pipe": (instead("config.json", os.mkfifo), "links"),
    "names that differ in case": (case_twins, "names"),
    "a name that Windows lacks": (write("aux.txt"), "names"),
    "a name that is no text": (no_utf8, "names"),
    "torch weights": (write("pytorch_model.bin"), "pickles"),
    "pickle under another name": (write("notes.txt", pickle.dumps({"a": 1})), "pickles"),
    "pickle without a mark": (write("notes.txt", pickle.dumps({"a": len}, 0)), "pickles"),
    "old binary pickle": (write("notes.txt", pickle.dumps([1, (2.5, "b")], 1)), "pickles"),
    "torch archive": (torch_archive, "pickles"),
    "token in the card": (append("README.md", f"\nUse {TOKEN} to load it.\n"), "secrets"),
    "private key": (write("id_rsa", b"-----BEGIN OPENSSH PRIVATE KEY-----\n"), "secrets"),
    "configuration is a folder": (instead("config.json", Path.mkdir), "links"),
    "licence is a folder": (instead("LICENSE", Path.mkdir), "links"),
    "recipe is a folder": (instead("recipe.toml", Path.mkdir), "links"),
    "torch weights in capitals": (write("W.PT"), "pickles"),
    "a PGP key": (write("eval/a.txt", b"-----BEGIN PGP PRIVATE KEY BLOCK-----\n"), "secrets"),
    "an AWS key for a day": (write("eval/a.txt", b"ASIA" + b"A1B2" * 4), "secrets"),
    "an organisation's token": (write("eval/a.txt", b"api_org_" + b"aB" * 17), "secrets"),
    "a Google key": (write("eval/a.txt", b"AIza" + b"aB1-_" * 7), "secrets"),
    "a Slack token": (write("eval/a.txt", b"xoxb-" + b"1234567890-" * 2 + b"abc"), "secrets"),
    "a GitLab token": (write("eval/a.txt", b"glpat-" + b"aB1_" * 5), "secrets"),
    "empty recipe": (write("recipe.toml", b""), "sizes"),
    "empty licence": (write("LICENSE", b""), "sizes"),
    "huge text": (write("eval/log.txt", b"x" * 10_000_001), "sizes"),
    "notes": (write("notes.md"), "stray"),
    "empty folder": (lambda f: (f / "notes").mkdir(), "stray"),
    "cache": (write("__pycache__/layers_flashmap.cpython-311.pyc", b"\xa7\r\r\n"), "stray"),
    "code that nothing imports": (write("old_flashmap.py", b"x = 1\n"), "stray"),
    "no licence's text": (write("LICENSE", b"all yours\n"), "licence"),
}
CODE: dict[str, tuple[Break, str]] = {
    "helper missing": (remove(LAYERS), "remote-code"),
    "dotted import": (append(LAYERS, '\n_ = """\nfrom .utils.x import y\n"""\n'), "remote-code"),
    "import of the folder": (append(LAYERS, "\nfrom . import cache_flashmap\n"), "remote-code"),
    "import in a docstring": (append(LAYERS, '\n"""\nfrom .gone import x\n"""\n'), "remote-code"),
    "helper that the model file does not name": (
        both(write("deep.py", b"x = 1\n"), append(LAYERS, "\nfrom .deep import x\n")),
        "remote-code",
    ),
    "no text": (write(LAYERS, b"\xff\xfe"), "remote-code"),
    "no Python": (append(LAYERS, "\ndef :\n"), "code-imports"),
    "package that may be missing": (append(LAYERS, "\nimport numpy\n"), "code-imports"),
    "this package": (append(LAYERS, "\nfrom flashmap.pair import x\n"), "code-imports"),
    "late import": (
        append(LAYERS, "\ndef f():\n    from .cache_flashmap import FlashMapCache\n"),
        "code-imports",
    ),
    "upper case": (write("Helper.py", b"x = 1\n"), "code-names"),
    "hyphen": (write("my-helper.py", b"x = 1\n"), "code-names"),
    "no post_init": (replace(MODELING, "self.post_init()", "pass"), "code-classes"),
    "unsaved buffer": (
        replace(
            MODELING,
            "self.post_init()",
            'self.register_buffer("x", None, persistent=False)\n        self.post_init()',
        ),
        "code-classes",
    ),
    "generate without the mixin": (
        replace(
            MODELING,
            "    def new_cache(",
            "    def generate(self):\n        pass\n\n    def new_cache(",
        ),
        "code-classes",
    ),
    "another class name": (
        replace(MODELING, "class FlashMapDraftModel(", "class Drafter("),
        "code-classes",
    ),
    "no auto_map": (config(auto_map=None), "auto-map"),
    "another architecture": (config(architectures=["Drafter"]), "auto-map"),
    "helper edited": (append(LAYERS, "\n# a hot fix\n"), "code-digest"),
    "custom_generate edited": (append(GENERATE, "\n# a hot fix\n"), "code-digest"),
    "custom_generate with a file more": (
        write("custom_generate/more.py", b"x = 1\n"),
        "code-digest",
    ),
    "requirements edited": (append("custom_generate/requirements.txt", "wheel\n"), "record"),
    "digest edited": (config(code_digest="0" * 64), "code-digest"),
    "stamp removed": (
        replace("configuration_flashmap.py", "CODE_DIGEST = ", "CODE_DIGESTED = "),
        "code-digest",
    ),
    "no custom_generate": (remove(GENERATE), "files"),
    "custom_generate without generate": (
        write(GENERATE, b"def go(model, **kwargs): ...\n"),
        "custom-generate",
    ),
    "custom_generate that takes no model": (
        write(GENERATE, b"def generate(): ...\n"),
        "custom-generate",
    ),
    "custom_generate with the folder's code": (
        write(
            GENERATE,
            b"from .loop_flashmap import x\ndef generate(model, **kwargs): ...\n",
        ),
        "custom-generate",
    ),
    "custom_generate of another release": (
        write(
            GENERATE,
            b'REPO_ID, TAG = "you/it", "v1"\ndef generate(model, **kwargs): ...\n',
        ),
        "custom-generate",
    ),
    "custom_generate with a package": (
        write(
            GENERATE,
            b"import flashmap\ndef generate(model, **kwargs): ...\n",
        ),
        "custom-generate",
    ),
}
CONFIGURATION: dict[str, tuple[Break, str]] = {
    "no taps": (config(target_layer_ids=None), "config"),
    "bottomless": (write("config.json", b"[" * 100_000), "config"),
    "another model": (config(model_type="llama"), "config"),
    "a grid that goes back": (
        config(jump_grids={"1": [0.0, 1.0], "2": [0.0, 1.5, 1.0]}),
        "config",
    ),
    "a field left out": (config(rms_norm_eps=None), "config-complete"),
    "not servable": (config(speculators_model_type="eagle"), "config-complete"),
    "a generation setting": (config(temperature=0.7), "config-keys"),
    "no markov_rank": (config(markov_rank=None), "engine-keys"),
    "a mask token that is none": (config(mask_token_id=-1), "engine-keys"),
    "taps beyond the target": (config(num_target_layers=1), "engine-keys"),
    "heads of another width": (config(head_dim=64), "engine-keys"),
    "first stage only": (config(flow_map=False), "stage"),
    "a target that is a folder": (target_folder, "target"),
    "no revision of the target": (config(target_revision=None), "target"),
    "another target than recorded": (config(target_vocab_hash="1" * 64), "target"),
    "grids of another vocabulary": (
        config(jump_grids={"1": [0.0, 1.0], "2": [0.0, 0.8172569274902344, 1.0]}),
        "grids",
    ),
    "another dtype": (config(torch_dtype="bfloat16"), "dtype"),
    "a draft vocabulary too large": (config(draft_vocab_size=10**6), "draft-vocab"),
}
WEIGHTS: dict[str, tuple[Break, str]] = {
    "no weights": (remove("model.safetensors"), "weight-files"),
    "truncated": (lambda f: truncate(f / "model.safetensors"), "weight-files"),
    "an adapter": (
        lambda f: shutil.copy(f / "model.safetensors", f / "adapter.safetensors"),
        "weight-files",
    ),
    "a stale shard": (
        lambda f: shutil.copy(f / "model.safetensors", f / "model-00001-of-00002.safetensors"),
        "weight-files",
    ),
    "an index of numbers": (
        write("model.safetensors.index.json", b'{"weight_map": {"a": 5}}'),
        "weight-files",
    ),
    "an index without a tensor": (sharded(lambda m: m.pop("fc.weight")), "weight-files"),
    "an index with the wrong file": (
        sharded(
            lambda m: m.update({"fc.weight": next(v for v in m.values() if v != m["fc.weight"])})
        ),
        "weight-files",
    ),
    "an index with an absent file": (
        sharded(lambda m: m.update({"x": "model-00003-of-00003.safetensors"})),
        "weight-files",
    ),
    "an index that leaves the folder": (rename_shard("../a.safetensors"), "weight-files"),
    "an index with a folder": (rename_shard("sub/a.safetensors"), "weight-files"),
    "no format": (
        lambda f: save_file(load_file(f / "model.safetensors"), f / "model.safetensors"),
        "weight-files",
    ),
    "tensor missing": (weights(lambda t: t.pop("fc.weight")), "weights"),
    "tensor unknown": (weights(lambda t: t.update(x=torch.zeros(1))), "weights"),
    "another shape": (weights(lambda t: t.update({"fc.weight": torch.zeros(3, 3)})), "weights"),
    "wider than its weights": (config(intermediate_size=32), "weights"),
    "NaN": (weights(lambda t: t["head.bias"].fill_(float("nan"))), "finite"),
    "infinite": (weights(lambda t: t["head.bias"].fill_(float("inf"))), "finite"),
    "two dtypes": (weights(lambda t: t.update(noise_gate=t["noise_gate"].half())), "dtype"),
    "id twice": (ranking(lambda t: t["ids"].__setitem__(0, t["ids"][1])), "draft-vocab"),
    "id out of range": (ranking(lambda t: t["ids"].__setitem__(0, 10**6)), "draft-vocab"),
    "ties out of order": (ranking(swap_first_two), "draft-vocab"),
    "counts that rise": (ranking(lambda t: t["counts"].__setitem__(-1, 99)), "draft-vocab"),
    "ids that are no integers": (ranking(lambda t: t.update(ids=t["ids"].float())), "draft-vocab"),
    "half a ranking": (ranking(lambda t: t.update(ids=t["ids"][:9].clone())), "draft-vocab"),
    "no counts": (ranking(lambda t: t.pop("counts")), "draft-vocab"),
    "cut without a ranking": (
        both(remove("draft_vocab.safetensors"), config(draft_vocab_size=99)),
        "draft-vocab",
    ),
}
CARD: dict[str, tuple[Break, str]] = {
    "unknown licence": (replace("README.md", "license: mit", "license: mine"), "card-metadata"),
    "no licence of the weights": (replace("README.md", "license: mit\n", ""), "card-metadata"),
    "other licence without a name": (
        replace("README.md", "license: mit", "license: other"),
        "card-metadata",
    ),
    "another library": (
        replace("README.md", "library_name: flashmap", "library_name: transformers"),
        "card-metadata",
    ),
    "another base model": (
        replace("README.md", "base_model: toy", "base_model: teddy"),
        "card-metadata",
    ),
    "another pipeline": (replace("README.md", ": text-generation", ": fill-mask"), "card-metadata"),
    "no tag for custom code": (replace("README.md", "- custom_code\n", ""), "card-metadata"),
    "a language that is none": (
        replace("README.md", "license: mit", "license: mit\nlanguage: English please"),
        "card-metadata",
    ),
    "results without a name": (
        replace("README.md", "license: mit", "license: mit\nmodel-index: [{results: []}]"),
        "card-metadata",
    ),
    "metadata that is no YAML": (
        replace("README.md", "license: mit", "license: [mit"),
        "card-metadata",
    ),
    "metadata without an end": (
        lambda f: (f / "README.md").write_text("---\nlicense: mit\n"),
        "card-metadata",
    ),
    "a card that is no text": (write("README.md", b"---\n\xff\n---\n"), "card-metadata"),
    "a marker lost": (
        replace("README.md", "<!-- flashmap:end usage -->", ""),
        "card-sections",
    ),
    "a part lost": (
        replace("README.md", "flashmap:begin limits", "flashmap:begin borders"),
        "card-sections",
    ),
    "a number changed": (replace("README.md", "**2.00**", "**3.00**"), "card-current"),
    "a link to nowhere": (append("README.md", "\n[more](docs/more.md)\n"), "card-links"),
    "a link out of the folder": (append("README.md", "\n[more](../copy/LICENSE)\n"), "card-links"),
    "a link to this disk": (append("README.md", "\n[more](/etc/hosts)\n"), "card-links"),
    "a named link to nowhere": (append("README.md", "\n[1]: docs/more.md\n"), "card-links"),
    "a picture that is not there": (
        append("README.md", '\n<img alt="x" src="docs/more.png">\n'),
        "card-links",
    ),
    "no picture": (remove("acceptance.png"), "card-links"),
    "another picture": (instead("acceptance.png", other_picture), "picture"),
    "a measurement that is none": (write("eval/acceptance.json", b"{}"), "eval"),
    "a measurement without rows": (
        lambda f: edit_json(f / "eval/acceptance.json", walk=[{"temperature": 0}]),
        "eval",
    ),
    "a measurement of nothing": (lambda f: edit_json(f / "eval/acceptance.json", walk=[]), "eval"),
    "a measurement of no length": (
        lambda f: edit_json(f / "eval/acceptance.json", settings={}),
        "eval",
    ),
    "a measurement of one version": (
        lambda f: edit_json(f / "eval/acceptance.json", versions="5.0"),
        "eval",
    ),
    "a recipe without tables": (write("recipe.toml", b"run = []\n"), "record"),
    "a recipe of words": (write("recipe.toml", b"[data]\nnum_prompts = 'x'\n"), "record"),
    "prompts elsewhere": (
        lambda f: edit_json(f / "eval/acceptance.json", prompts={"file": "../a.txt", "count": 6}),
        "eval",
    ),
    "no prompts": (remove("eval/prompts.jsonl"), "eval"),
}
RECORD: dict[str, tuple[Break, str]] = {
    "licence edited": (append("LICENSE", "and more\n"), "record"),
    "hand-written text edited": (append("README.md", "\nA word more.\n"), "record"),
    "weights changed": (weights(lambda t: t["head.bias"].add_(1.0)), "record"),
    "a measurement changed": (
        lambda f: edit_json(f / "eval/acceptance.json", walk=[setting(0.0, 8.0)]),
        "record",
    ),
    "a measurement added": (
        lambda f: shutil.copy(f / "eval/acceptance.json", f / "eval/more.json"),
        "record",
    ),
    "ranking lost": (remove("draft_vocab.safetensors"), "record"),
    "a recipe that is no TOML": (write("recipe.toml", b"[run\n"), "record"),
    "recipe lost": (remove("recipe.toml"), "card-links"),
    "record of other code": (record(code_digest="0" * 64), "record"),
    "record of other grids": (record(grid_mode="compat"), "record"),
    "record without versions": (record(versions=None), "record"),
    "record of a list of versions": (record(versions=[]), "record"),
    "record of another tag": (record(tag="v2"), "custom-generate"),
    "record of another repository": (record(repo_id="you/it"), "custom-generate"),
    "record of a list": (write("release.json", b'{"files": ["README.md"]}'), "record"),
    "record that is no JSON": (write("release.json", b"{"), "record"),
}
DAMAGE = {**FILES, **CODE, **CONFIGURATION, **WEIGHTS, **CARD, **RECORD}


@pytest.mark.parametrize("kind", DAMAGE)
def test_exactly_the_damage_is_found(kind: str, copy: Path) -> None:
    break_it, name = DAMAGE[kind]
    break_it(copy)
    findings = check_statically(copy)
    assert failures(findings).keys() == {name}, failures(findings)
    told = next(finding for finding in findings if finding.check == name)
    assert told.found and told.expected and told.fix


def test_no_kind_is_named_twice() -> None:
    parts = (FILES, CODE, CONFIGURATION, WEIGHTS, CARD, RECORD)
    assert len(DAMAGE) == sum(map(len, parts))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no text", [LAYERS]),
        ("broken link", ["gone.py (symlink)"]),
        ("pipe", ["pipe.safetensors (special file)"]),
        ("token in the card", ["Hugging Face token", "README.md"]),
        ("an index of numbers", ["model.safetensors.index.json", "5"]),
        ("tensor missing", ["fc.weight missing", "1 of"]),
        ("grids of another vocabulary", ["jump_grids['2'][1]", "264 tokens"]),
        ("helper edited", ["code_digest", f"{LAYERS} changed since the build"]),
        ("unknown licence", ["'mine'"]),
        ("a number changed", ["results"]),
        ("licence edited", ["LICENSE changed since the build"]),
        ("cut without a ranking", ["draft_vocab_size 99"]),
    ],
)
def test_a_finding_says_what_and_where(kind: str, words: list[str], copy: Path) -> None:
    DAMAGE[kind][0](copy)
    (found,) = failures(check_statically(copy)).values()
    assert [word for word in words if word not in found] == []
    assert TOKEN not in found


def test_two_kinds_of_damage_are_two_findings(copy: Path) -> None:
    for kind in ("another architecture", "no markov_rank", "NaN", "notes", "unknown licence"):
        DAMAGE[kind][0](copy)
    expected = {"auto-map", "engine-keys", "finite", "stray", "card-metadata"}
    assert failures(check_statically(copy)).keys() == expected
