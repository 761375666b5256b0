"""What a Hub accepts in a model card's front matter, as far as this can be known without asking it.

The Hub's own check needs a connection; this one names what it refuses, and what would make it show
something wrong.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flashmap.references import HUB_ID

LICENCES = frozenset(
    """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m
    bigscience-bloom-rail-1.0 bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear
    bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0
    cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0
    cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0
    creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
    fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research
    intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3
    llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openrail openrail++
    osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib
    """.split()  # noqa: SIM905 - a list this long is read as a table
)
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual")
TAG = re.compile(r"[A-Za-z0-9][\w .:+/-]{0,99}")
# With another library the Hub shows a snippet of that library, which cannot load a drafter.
LIBRARY, PIPELINE = "flashmap", "text-generation"
REQUIRED_TAGS = ("speculative-decoding", "draft-model", "custom_code")


def metadata_problems(data: Mapping[str, Any], target: str) -> Iterator[str]:
    """What is wrong with a card's front matter ``data`` for a drafter of ``target``."""
    yield from _licence(data)
    bases = _listed(data.get("base_model"))
    if HUB_ID.fullmatch(target) and target not in bases:
        yield f"base_model {data.get('base_model')!r} is not the target {target}"
    if data.get("library_name") != LIBRARY:
        yield f"library_name {data.get('library_name')!r} is not {LIBRARY}"
    if data.get("pipeline_tag", PIPELINE) != PIPELINE:
        yield f"pipeline_tag {data['pipeline_tag']!r} is not {PIPELINE}"
    missing = [tag for tag in REQUIRED_TAGS if tag not in _listed(data.get("tags"))]
    if missing:
        yield f"tags without {', '.join(missing)}"
    for key, rule in FORMS.items():
        odd = [value for value in _listed(data.get(key)) if not _is_text(value, rule)]
        if odd:
            yield f"{key} {odd[0]!r} is not of the form that the Hub knows"
    if "model-index" in data:
        yield from _model_index(data["model-index"])


def _licence(data: Mapping[str, Any]) -> Iterator[str]:
    licence = data.get("license")
    if licence is None:
        yield "no license: that of the weights"
    elif not isinstance(licence, str) or licence not in LICENCES:
        yield f"license {licence!r} is none that the Hub knows"
    elif licence == "other" and not {"license_name", "license_link"} <= data.keys():
        yield "license other without license_name and license_link"


def _listed(value: Any) -> list[Any]:
    """A key's values: the Hub takes one or a list of them."""
    return [] if value is None else value if isinstance(value, list) else [value]


def _is_text(value: Any, rule: Callable[[str], object]) -> bool:
    return isinstance(value, str) and bool(rule(value))


FORMS: dict[str, Callable[[str], object]] = {
    "base_model": HUB_ID.fullmatch,
    "base_model_relation": lambda text: text.strip(),
    "datasets": HUB_ID.fullmatch,
    "language": LANGUAGE.fullmatch,
    "license_link": lambda text: text.strip(),
    "license_name": re.compile(r"[a-z0-9-.]+").fullmatch,
    "tags": TAG.fullmatch,
}


def _model_index(value: Any) -> Iterator[str]:
    """A list of models, each with a name and results that state task, dataset and metrics."""
    models = value if isinstance(value, list) else []
    results = [row for model in models if isinstance(model, dict)
               for row in _listed(model.get("results"))]  # fmt: skip
    named = [isinstance(model, dict) and isinstance(model.get("name"), str) for model in models]
    whole = [isinstance(row, dict) and {"task", "dataset", "metrics"} <= row.keys()
             for row in results]  # fmt: skip
    if not models or not all(named) or not all(whole):
        yield "model-index is not a list of models with a name and whole results"
