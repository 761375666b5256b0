"""Checks that run the folder's own code, in processes that stand for a stranger's machine (see
`loads`)."""

from ..checking import ReleaseFolder, check
from ..contents import GOLDEN, read_json
from ..errors import ReleaseError
from ..golden import TOLERANCE

# Code from a folder that is not as it was built may be anybody's, and is not run.
TRUSTED = ("code", "configuration", "weights", "leftovers")
KINDS = ("missing", "unexpected", "mismatched", "on_meta", "not_finite")


@check("load", needs=TRUSTED)
def load(release: ReleaseFolder) -> str:
    """Every tensor loaded by AutoModel with trust_remote_code, and none left over."""
    golden = read_json(release.path, GOLDEN, "golden")
    if not isinstance(golden.get("logits"), dict):
        raise ReleaseError(
            "load", f"{GOLDEN} without logits", "the build's outputs", "build again", [GOLDEN]
        )
    for report in release.reports:
        problems = [f"{kind}: {', '.join(report[kind][:3])}" for kind in KINDS if report[kind]]
        if problems:
            raise ReleaseError(
                "load",
                f"{'; '.join(problems)}, with transformers {report['transformers']}",
                "every tensor loaded, none left over",
                "build from a whole checkpoint",
            )
    first, others = release.reports[0], release.reports[1:]
    also = "".join(f" and {report['transformers']}" for report in others)
    return (
        f"{first['class']} with {first['parameters']:,} parameters, transformers "
        f"{first['transformers']}{also}, no flashmap"
    )


@check("golden", needs=[*TRUSTED, "loading"])
def golden_outputs(release: ReleaseFolder) -> str:
    """The logits that the drafter gave when it was built."""
    for report in release.reports:
        if report["golden"] is None or not report["golden"] <= TOLERANCE:
            raise ReleaseError(
                "golden",
                f"logits off by {report['golden']} of the largest, with transformers "
                f"{report['transformers']}",
                f"those of {GOLDEN} within {TOLERANCE:g}",
                "find out which of weights, code and torch changed; build again if it was meant",
                [GOLDEN],
            )
    worst = max(report["golden"] for report in release.reports)
    return f"logits within {worst:.1e} of the largest"


@check("resave", needs=[*TRUSTED, "loading"])
def resave(release: ReleaseFolder) -> str:
    """Saved, loaded and saved again, nothing changes."""
    for report in release.reports:
        if report["resaved"]:
            raise ReleaseError(
                "resave",
                f"{', '.join(report['resaved'][:3])} changed by save_pretrained, with transformers "
                f"{report['transformers']}",
                "the same tensors, files and logits",
                "mend the model's code",
            )
    return "the same after saving and loading"
