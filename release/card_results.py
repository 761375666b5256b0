"""The card's numbers: a table of acceptance or speed for every file of measurements, with the
hardware, the day and the command.
"""

import textwrap
from typing import TYPE_CHECKING, Any

from .contents import PICTURE
from .measurements import ACCEPTANCE, Measurement, Row, Setting

if TYPE_CHECKING:
    from .card import Facts

ALL = "all"
WIDTH = 100


def results(facts: "Facts", licence: str) -> str | None:
    """Acceptance, its picture, and speed."""
    if not facts.measurements:
        return None
    parts = ["## Results"]
    acceptance = [measured for measured in facts.measurements if measured.kind == ACCEPTANCE]
    parts += [_acceptance(measured) for measured in acceptance]
    if acceptance and PICTURE in facts.files:
        parts.append(
            f"![Share of drafts that the target kept, for each slot of the block]({PICTURE})"
        )
    parts += [_speed(measured) for measured in facts.measurements if measured not in acceptance]
    return "\n\n".join(parts)


def _acceptance(measured: Measurement) -> str:
    settings, protocol = measured.settings, measured.protocol
    wanted, prompts = protocol["settings"]["max_new_tokens"], protocol["prompts"]["count"]
    looped = ", ".join(
        f"{setting.overall.looped} of {setting.overall.texts} at {_name(setting)}"
        for setting in settings
    )
    intro = (
        f"Tokens a pass of the target, the bonus token included, over {prompts} prompts and up to "
        f"{wanted} new tokens each. Answers that end in a loop, which any drafter predicts, are "
        f"left out ({looped}); the last row has them in."
    )
    domains = [row.domain for row in settings[0].rows]
    table = [["domain", *map(_name, settings)]]
    table += [
        [domain, *(_number(_of(setting, domain).without_looped) for setting in settings)]
        for domain in domains
    ]
    table.append([ALL, *(f"**{_number(s.overall.without_looped)}**" for s in settings)])
    table.append(
        [f"{ALL}, looping ones too", *(_number(s.overall.acceptance_length) for s in settings)]
    )
    return "\n\n".join(["### Acceptance", _filled(intro), _markdown(table), _measured(measured)])


def _of(setting: Setting, domain: str) -> Row:
    return next(row for row in setting.rows if row.domain == domain)


def _name(setting: Setting) -> str:
    jumps = f"{setting.num_steps} jump{'s' if setting.num_steps > 1 else ''}"
    draws = f", {setting.num_draws} draws" if setting.num_draws > 1 else ""
    return f"temperature {setting.temperature:g}, {jumps}{draws}"


def _speed(measured: Measurement) -> str:
    document, protocol = measured.document, measured.protocol
    rows = [*document["rows"], {**document["overall"], "domain": ALL}]
    if len(document["rows"]) == 1 and document["rows"][0]["domain"] == ALL:
        rows = rows[1:]
    table = [["domain", "plain tokens/s", "FlashMap tokens/s", "speedup", "tokens a pass", "equal"]]
    for row in rows:
        equal = "" if row.get("identical") is None else f"{row['identical']} of {row['prompts']}"
        table.append(
            [
                str(row["domain"]),
                f"{row['plain_tokens_per_second']:.1f}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f}x",
                _number(row.get("acceptance_length")),
                equal or "-",
            ]
        )
    intro = (
        f"{protocol['prompts']['count']} prompts, up to {protocol.get('max_new_tokens')} new "
        f"tokens, temperature {protocol.get('temperature', 0):g}, one text at a time; plain "
        "decoding of the same target right before or after each. Equal: texts with the tokens of "
        "plain decoding. Looping answers count."
    )
    return "\n\n".join(["### Speed", _filled(intro), _markdown(table), _measured(measured)])


def _measured(measured: Measurement) -> str:
    """Hardware, template, versions, day, commit and command of a measurement."""
    protocol = measured.protocol
    template = protocol.get("template", "the target's chat template, one user turn")
    facts = {
        "On": protocol.get("device"),
        "in": protocol.get("dtype"),
        "with": ", ".join(f"{k} {v}" for k, v in protocol.get("versions", {}).items() if v),
        "on the day": protocol.get("date"),
        "at commit": str(protocol.get("commit") or "")[:12],
    }
    told = ", ".join(f"{word} {value}" for word, value in facts.items() if value)
    text = f"{told}. Prompts: {template}, its settings as they come (no thinking mode asked for)."
    command = protocol.get("command")
    by = f"`{command}`, kept in" if command else "Kept in"
    return f"{_filled(text)}\n{by} [`{measured.name}`]({measured.name})."


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}"


def _markdown(table: list[list[str]]) -> str:
    rows = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([rows[0], f"|{'---|' * len(table[0])}", *rows[1:]])
