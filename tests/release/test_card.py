"""`release card`: what people wrote stays byte for byte, the rest says what configuration and
measurements say, and every snippet works."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.pair_folders import edit_json, write_drafter, write_target
from support.releases import check_statically, failures, setting, write_measurement, write_source

from flashmap.release import card_sections
from flashmap.release.build import build_release
from flashmap.release.card import Facts, render_card, write_card
from flashmap.release.errors import ReleaseError
from flashmap.release.hub_metadata import metadata_problems
from flashmap.release.markers import segments, with_sections
from flashmap.release.measurements import read_measurements
from flashmap.release.picture import data_digest, draw, stated_digest

ROOT = Path(__file__).resolve().parents[2]
HAND = """---\r
license: other\r
license_name: mine\r
license_link: https://example.org\r
language: [en, de]\r
---\r
# Title \u2014 by hand\r
\r
Words with  odd   spaces\t\r
<!-- flashmap:begin overview -->\r
old\r
<!-- flashmap:end overview -->\r
between\r
<!-- an own comment -->\r
"""


def written(text: str) -> str:
    """The text without its generated parts and their markers."""
    return "".join(part for name, part in segments(text) if name is None)


def test_what_people_wrote_is_kept_byte_for_byte(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    (source / "README.md").write_bytes(HAND.encode())
    assert write_card(source).changed == ["acceptance.png", "README.md"]
    text = (source / "README.md").read_bytes().decode()
    # Blank lines that keep new parts apart end otherwise than the lines of this hand.
    assert re.sub(r"(?<!\r)\n", "", written(text)) == written(HAND)
    assert "\nold\r\n" not in text and text.count("flashmap:begin overview") == 1
    assert text.index("flashmap:end overview") < text.index("flashmap:begin usage")
    data = yaml.safe_load(text.split("---")[1])
    assert data["license_name"] == "mine" and data["base_model"] == "toy"
    before = (source / "README.md").stat().st_mtime_ns
    assert write_card(source).changed == []
    assert (source / "README.md").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "text", ["# Title\n", "---\nlicense: mit\n---\n", "no newline", "---\n---"]
)
def test_any_card_gets_its_parts(text: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    (source / "README.md").write_text(text)
    write_card(source, picture=False)
    found = (source / "README.md").read_text()
    assert {name for name, _ in segments(found)} - {None} == {"metadata", *card_sections.SECTIONS}
    assert yaml.safe_load(found.split("---")[1])["library_name"] == "flashmap"
    assert text.strip("-\n") in found


def test_keys_that_people_wrote_win(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: mit\nbase_model: other/base\n---\n")
    write_card(source, picture=False)
    text = (source / "README.md").read_text()
    assert text.count("base_model:") == 1
    assert yaml.safe_load(text.split("---")[1])["base_model"] == "other/base"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- flashmap:begin usage -->\n", "begin usage without its end"),
        ("<!-- flashmap:end usage -->\n", "end usage after no begin"),
        (
            "<!-- flashmap:begin usage -->\n<!-- flashmap:begin limits -->\n",
            "begin limits after begin usage",
        ),
        (
            "<!-- flashmap:begin usage -->\n<!-- flashmap:end limits -->\n",
            "end limits after begin usage",
        ),
        ("<!-- flashmap:begin a -->\n<!-- flashmap:end a -->\n" * 2, "two parts named a"),
    ],
)
def test_markers_that_do_not_pair_are_refused(text: str, words: str) -> None:
    with pytest.raises(ReleaseError) as caught:
        with_sections(text, {"usage": "new"})
    assert words in caught.value.found


def test_a_mark_of_byte_order_does_not_hide_the_metadata(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    (source / "README.md").write_bytes(b"\xef\xbb\xbf---\nlicense: mit\n---\n# Mine\n")
    write_card(source, picture=False)
    content = (source / "README.md").read_bytes()
    assert content.startswith(b"---\nlicense: mit\n") and content.count(b"\n---\n") == 1


def test_what_cannot_be_read_leaves_the_picture_alone(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    (source / "recipe.toml").write_text("[run")
    with pytest.raises(ReleaseError):
        write_card(source)
    assert not (source / "acceptance.png").exists()


def test_a_card_that_cannot_be_read_stays_as_it_is(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    for content in (b"\xff", b"---\nlicense: [\n---\n", b"---\nlicense: mit\n"):
        (source / "README.md").write_bytes(content)
        with pytest.raises(ReleaseError):
            write_card(source, picture=False)
        assert (source / "README.md").read_bytes() == content


def test_numbers_are_those_of_the_measurements(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    write_measurement(source, walk=[setting(0.0, 2.34)], loop=[setting(0.0, 3.21)])
    rates = {"tokens_per_second": 125.0, "plain_tokens_per_second": 100.0, "speedup": 1.25}
    row = {"domain": "all", "prompts": 6, "acceptance_length": 2.5, "identical": 5, **rates}
    prompts = {"file": "prompts.jsonl", "count": 6}
    command = "flashmap bench --json"
    protocol = {"prompts": prompts, "device": "cuda:0 (an H200)", "command": command}
    document = {"protocol": protocol, "rows": [row], "overall": row}
    (source / "eval/speed.json").write_text(json.dumps(document))
    write_card(source, picture=False)
    text = (source / "README.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    # The loop is what users run; it wins over the walk.
    assert "| a | 2.96 |" in table and "| b | 3.46 |" in table and "| all | **3.21** |" in table
    assert "| all, looping ones too | 3.71 |" in table
    assert "| all | 100.0 | 125.0 | 1.25x | 2.50 | 5 of 6 |" in table
    words = ["cpu (an abacus)", "cuda:0 (an H200)", "`flashmap train eval recipe.toml`",
             "`flashmap bench --json`", "2026-01-02", "commit 1234567890ab", "torch 2.13.0",
             "eval/speed.json", "1 of 6 at temperature 0"]  # fmt: skip
    assert [word for word in words if word not in " ".join(text.split())] == []


def test_facts_are_those_of_the_drafter(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    edit_json(source / "config.json", draft_vocab_size=100)
    out = build_release(source, tmp_path / "out", tag="v2", repo_id="me/it").folder
    text = (out / "README.md").read_text()
    tensors = load_file(out / "model.safetensors").values()
    count = sum(tensor.numel() for tensor in tensors)
    words = [f"{count:,} parameters", "2 layers, width 16, 2 heads", "decoder layers 0, 1 of 3",
             "3 tokens; jumps a draft: 1, with grids for 1, 2, 3, 4 (exact for 264 tokens)",
             "100 of 264 tokens", f"revision `{'0' * 40}`", "12 steps", "up to 64 tokens",
             "verifies 4 tokens", "the weights `mit`", '`revision="v2"`',
             "arXiv:2602.16813"]  # fmt: skip
    assert [word for word in words if word not in text] == []


def snippets(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_snippet_runs_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = build_release(write_source(tmp_path / "source"), tmp_path / "out").folder
    write_target(tmp_path / "target")
    code = snippets((out / "README.md").read_text())[0]
    for name, folder in (("path/to/this/folder", out), ("toy", tmp_path / "target")):
        assert f'"{name}"' in code
        code = code.replace(f'"{name}"', repr(str(folder)))
    code = code.replace(f'revision="{"0" * 40}"', "revision=None").replace("bfloat16", "float32")
    exec(code.replace("max_new_tokens=256", "max_new_tokens=5"), {})
    assert re.search(r"\d\.\d\d tokens a pass of the target", capsys.readouterr().out)


def test_a_published_release_is_pinned(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    out = build_release(source, tmp_path / "out", tag="v1", repo_id="me/it").folder
    code = snippets((out / "README.md").read_text())[0]
    calls = re.findall(r"from_pretrained\((.*?)\)", code, re.DOTALL)
    assert 'DRAFT, TARGET = "me/it", "toy"' in code and len(calls) == 3
    assert 'revision="v1"' in calls[0]
    assert all(f'revision="{"0" * 40}"' in call for call in calls[1:])


def test_no_engine_snippet_without_its_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path / "source")
    monkeypatch.setattr(card_sections, "has_plugin", lambda name: False)
    out = build_release(source, tmp_path / "out", tag="v1", repo_id="me/it").folder
    text = (out / "README.md").read_text()
    assert "vllm serve" not in text and "sglang.launch" not in text and "no plugin" in text
    monkeypatch.setattr(card_sections, "has_plugin", lambda name: True)
    out = build_release(source, tmp_path / "out", tag="v1", repo_id="me/it").folder
    text = (out / "README.md").read_text()
    config = json.loads(re.findall(r"--speculative-config '(.*)'", text)[0])
    assert config == {"model": "me/it", "num_speculative_tokens": 3, "revision": "v1"}
    assert "--speculative-algorithm DSPARK --speculative-draft-model-path me/it" in text
    assert "pip install 'flashmap-hub[vllm]==" in text


def test_a_release_rewritten_still_passes(tmp_path: Path) -> None:
    out = build_release(write_source(tmp_path / "source"), tmp_path / "out").folder
    text = (out / "README.md").read_text()
    (out / "README.md").write_text(text.replace("**2.00**", "**9.00**"))
    assert failures(check_statically(out)).keys() == {"card-current"}
    assert write_card(out).changed == ["acceptance.png", "README.md"]
    assert failures(check_statically(out)) == {}
    # By hand, or by a run that was killed before it came to the record.
    (out / "README.md").write_text((out / "README.md").read_text() + "\nA word more.\n")
    assert failures(check_statically(out)).keys() == {"record"}
    assert write_card(out).changed == []
    assert failures(check_statically(out)) == {}


# --- the picture


def test_the_same_numbers_give_the_same_picture(tmp_path: Path) -> None:
    found = read_measurements(write_source(tmp_path / "source"))
    for name in ("a.png", "b.png"):
        assert draw(found, tmp_path / name)
    content = (tmp_path / "a.png").read_bytes()
    assert content == (tmp_path / "b.png").read_bytes() and len(content) < 60_000
    assert stated_digest(content) == data_digest(found) and stated_digest(b"GIF89a") is None


def test_the_picture_shows_the_slots(tmp_path: Path) -> None:
    from matplotlib import image

    source = write_source(tmp_path / "source")
    heights = []
    for share in (0.1, 0.9):
        row = setting(0.0, 2.0)
        row["overall"]["slots"] = [share] * 3
        write_measurement(source, walk=[row])
        draw(read_measurements(source), tmp_path / "x.png")
        pixels = torch.tensor(image.imread(tmp_path / "x.png")[..., :3])
        blue = ((pixels - torch.tensor([0.122, 0.467, 0.706])).abs() < 0.02).all(dim=-1)
        rows, columns = blue.nonzero(as_tuple=True)
        right = rows[columns > 0.8 * pixels.shape[1]]  # away from the legend
        heights.append(1.0 - float(right.double().mean()) / len(pixels))
    assert heights[0] < 0.35 and heights[1] > 0.75


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path / "source")
    before = (source / "README.md").read_bytes()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ReleaseError, match="pip install matplotlib, or pass --no-picture"):
        write_card(source)
    assert (source / "README.md").read_bytes() == before
    assert write_card(source, picture=False).changed == ["README.md"]


def test_no_measurements_no_picture(tmp_path: Path) -> None:
    source = write_drafter(tmp_path / "source")
    assert write_card(source).changed == ["README.md"]
    assert "## Results" not in (source / "README.md").read_text()


# --- what a Hub takes


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, None),
        ({"license": "apache-2.0", "language": ["en", "zh-Hant"], "datasets": ["a/b", "c"]}, None),
        ({"license": None}, "no license"),
        ({"license": ["mit"]}, "license"),
        ({"language": "english please"}, "language"),
        ({"datasets": ["https://x"]}, "datasets"),
        ({"tags": ["speculative-decoding", "draft-model", "custom_code", 5]}, "tags 5"),
        ({"base_model": ["toy", "../x"]}, "base_model '../x'"),
        ({"model-index": [{"name": "x", "results": [{"task": {}, "dataset": {}}]}]}, "model-index"),
        (
            {"model-index": [{"name": "x", "results": [{"task": 1, "dataset": 1, "metrics": 1}]}]},
            None,
        ),
        ({"base_model_relation": 4}, "base_model_relation"),
    ],
)
def test_metadata(changes: dict[str, Any], word: str | None) -> None:
    data = {
        "license": "mit",
        "base_model": "toy",
        "library_name": "flashmap",
        "tags": ["speculative-decoding", "draft-model", "custom_code"],
    }
    found = list(metadata_problems({**data, **changes}, "toy"))
    assert (found == []) if word is None else (len(found) == 1 and word in found[0])


def test_the_embedded_drafters_card_is_up_to_date() -> None:
    folder = ROOT / "models/smollm2-135m"
    content = (folder / "README.md").read_bytes()
    assert render_card(content, Facts.of(folder, {})) == content
    png = (folder / "acceptance.png").read_bytes()
    assert stated_digest(png) == data_digest(read_measurements(folder))
