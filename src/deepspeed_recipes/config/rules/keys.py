"""Rules about syntax that is not strict JSON, and about unknown, misspelt, misplaced, removed and duplicate keys."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

from ...recipe.errors import first_sentence
from ...recipe.files import Json
from .. import schema
from ..read import Key
from ..rule import COSTS, FAILS_LATER, REJECTED, WRONG, Config, Edit, Facts, Hit, Severity, dotted, rule
from ..schema import fits, nearest


def _problems(kind: str) -> Callable[[Config, Facts], Iterator[Hit]]:
    def check(config: Config, facts: Facts) -> Iterator[Hit]:
        for problem in config.problems:
            if problem.kind == kind:
                # DeepSpeed itself reads hjson, which allows these.
                mild = facts.trainer == "plain" and kind in ("comment", "trailing-comma", "missing-comma")
                yield Hit(problem.key, problem.value, problem.what, severity="warning" if mild else None)

    return check


_duplicate_key = rule("duplicate-key", "error", REJECTED)(_problems("duplicate"))
_comment = rule("comment", "error", FAILS_LATER)(_problems("comment"))
_trailing_comma = rule("trailing-comma", "error", FAILS_LATER)(_problems("trailing-comma"))
_missing_comma = rule("missing-comma", "error", FAILS_LATER)(_problems("missing-comma"))
_not_a_number = rule("not-a-number", "error", FAILS_LATER)(_problems("not-a-number"))
_python_word = rule("python-word", "error", FAILS_LATER)(_problems("python-word"))


# Names from old guides that are too different from the current ones for a spelling match.
_OLD_NAMES = {
    ("aio", "thread_count"): "intra_op_parallelism",
    ("aio", "num_threads"): "intra_op_parallelism",  # what ds_nvme_tune prints
}


@dataclass(frozen=True)
class _Unknown:
    """A key of the config that is unknown in its section."""

    path: Key
    value: object
    refused: bool
    """True if DeepSpeed rejects the key, False if DeepSpeed ignores it."""
    nearest: str | None
    """The key of the same section that is meant, if this is a misspelling."""
    home: Key | None
    """The key of this name in another section."""


@lru_cache(maxsize=1)  # four rules use it for one config, and each unknown key costs 10 to 50 us
def _unknown(config: Config) -> list[_Unknown]:
    """Return the unknown keys.

    A typed section rejects an unknown key, unless its value is "auto": such keys are dropped before it is read.
    """
    removed = schema.load()["removed"]
    removed_zero = schema.load()["removed_zero"]
    found = []
    for path, value, node in schema.walk(config.value):
        name = str(path[-1])
        gone = name in (removed if len(path) == 1 else removed_zero if len(path) == 2 else ())
        if name in node["keys"] or node["unknown"] == "open" or gone:
            continue
        if path[0] == "bfloat16" and config.get("bf16") is not None:
            continue  # ignored as a whole; `bf16-twice` reports it
        refused = node["unknown"] == "rejected" and value != "auto"
        found.append(_Unknown(path, value, refused, nearest(name, tuple(node["keys"])), _homes().get(name)))
    return found


@cache
def _homes() -> dict[str, Key]:
    """Return the path of each key name that only one section of the schema has."""
    homes: dict[str, list[Key]] = {}
    pending: list[tuple[Key, Json]] = [((), schema.load()["root"])]
    while pending:
        path, node = pending.pop()
        for key, entry in node["keys"].items():
            if not entry.get("alias_of"):
                homes.setdefault(key, []).append((*path, key))
            if "section" in entry:
                pending.append(((*path, key), entry["section"]))
    return {name: paths[0] for name, paths in homes.items() if len(paths) == 1}


def _rename(path: Key, right: str, config: Config) -> tuple[Edit, ...]:
    """Return the edit, unless the right key is set already or does not accept the wrong key's value.

    For a key without a type, the value has to have the type of the default.
    """
    if right in config.section(*path[:-1]):
        return ()
    entry, value = schema.entry((*path[:-1], right)), config.get(*path)
    default = entry.get("default")
    if value == "auto":
        suits = "section" not in entry
    elif "type" in entry:
        suits = fits(entry["type"], value)
    elif "section" in entry:
        suits = isinstance(value, dict)
    elif isinstance(default, bool) or isinstance(value, bool):
        suits = isinstance(value, bool) and isinstance(default, bool | None)
    else:
        alike = isinstance(value, (int, float)) or not isinstance(default, (int, float))
        suits = alike and schema.accepts(entry, value)
    return (Edit("rename", path, right),) if suits else ()


@rule("unknown-key", "error", REJECTED)
def _rejected(config: Config, facts: Facts) -> Iterator[Hit]:
    for key in _unknown(config):
        if not key.refused:
            continue
        section = dotted(key.path[:-1])
        if key.nearest:
            fix = f"did you mean `{key.nearest}`?"
        elif key.home:
            fix = f"move it to `{dotted(key.home)}`" + (", at the top level" if len(key.home) == 1 else "")
        else:
            fix = f"remove it; `{section}` has no such key"
        edits = _rename(key.path, key.nearest, config) if key.nearest else ()
        yield Hit(key.path, key.value, f"`{section}` rejects unknown keys", fix, edits)


@rule("misspelt-key", "error", WRONG)
def _misspelt(config: Config, facts: Facts) -> Iterator[Hit]:
    for key in _unknown(config):
        if key.nearest and not key.refused and key.path not in _OLD_NAMES:
            edits = _rename(key.path, key.nearest, config)
            fix = f"did you mean `{key.nearest}`?"
            yield Hit(key.path, key.value, f"`{key.path[-1]}` is silently ignored", fix, edits)


@rule("misplaced-key", "error", WRONG)
def _misplaced(config: Config, facts: Facts) -> Iterator[Hit]:
    for key in _unknown(config):
        if key.home and not key.nearest and not key.refused:
            what = f"`{dotted(key.path)}` is silently ignored"
            yield Hit(key.path, key.value, what, f"move it to `{dotted(key.home)}`")


@rule("ignored-key", "warning", WRONG)
def _ignored(config: Config, facts: Facts) -> Iterator[Hit]:
    for key in _unknown(config):
        if not (key.refused or key.home or key.nearest or key.path in _OLD_NAMES):
            yield Hit(key.path, key.value, f"DeepSpeed has no key `{dotted(key.path)}` and ignores it")


@rule("renamed-key", "warning", WRONG)
def _old_name(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, right in _OLD_NAMES.items():
        if config.has(*path):
            edits = _rename(path, right, config)
            what = f"DeepSpeed ignores `{path[-1]}` since 0.16"
            yield Hit(path, config.get(*path), what, f"rename it to `{right}`", edits)


@rule("removed-feature", "error", REJECTED)
def _removed(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, messages in (((), "removed"), (("zero_optimization",), "removed_zero")):
        for name, message in schema.load()[messages].items():
            value = config.get(*path, name)
            if config.has(*path, name):
                off = isinstance(value, dict) and value.get("enabled") is False
                edits = (Edit("remove", (*path, name)),) if off or value is False else ()
                what = first_sentence(message)
                even = ", even with the feature switched off" if off else ""
                yield Hit((*path, name), value, f"{what}; DeepSpeed rejects the key{even}", "", edits)


@rule("deprecated-key", "warning", COSTS)
def _deprecated(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, value, node in schema.walk(config.value):
        entry = node["keys"].get(path[-1], {})
        right = entry.get("deprecated")
        if right and value != "auto":
            edits = _rename(path, _public(node, right), config) if right in node["keys"] else ()
            yield Hit(path, value, f"`{path[-1]}` is deprecated", f"use `{_public(node, right)}`", edits)


@rule("deprecated-and-new", "error", REJECTED)
def _deprecated_and_new(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, value, node in schema.walk(config.value):
        entry = node["keys"].get(path[-1], {})
        right = entry.get("deprecated")
        if not right or not entry["excludes"] or value == "auto":
            continue
        siblings = config.section(*path[:-1])
        names = [right, *(name for name, other in node["keys"].items() if other.get("alias_of") == name)]
        names.append(_public(node, right))
        if any(name in siblings and siblings[name] != "auto" for name in names):
            what = f"`{path[-1]}` and `{_public(node, right)}` cannot both be set"
            yield Hit(path, value, what, f"remove `{path[-1]}`", (Edit("remove", path),))


@rule("both-spellings", "error", REJECTED)
def _both_spellings(config: Config, facts: Facts) -> Iterator[Hit]:
    for path, value, node in schema.walk(config.value):
        alias = node["keys"].get(path[-1], {}).get("alias_of")
        siblings = config.section(*path[:-1])
        if alias and value != "auto" and siblings.get(alias, "auto") != "auto":
            what = f"`{path[-1]}` and `{alias}` are the same field; DeepSpeed rejects the second spelling"
            yield Hit(path, value, what, f"remove `{path[-1]}`", (Edit("remove", path),))


def _public(node: Json, name: str) -> str:
    """Return the documented spelling of a field (`stage3_...`)."""
    return str(node["keys"].get(name, {}).get("alias_of", name))


@rule("bf16-twice", "error", WRONG)
def _bf16_twice(config: Config, facts: Facts) -> Iterator[Hit]:
    if config.get("bf16") is not None and config.has("bfloat16"):
        differ = config.get("bf16") != config.get("bfloat16")
        what = "`bf16` and `bfloat16` are both set; `bfloat16` is ignored"
        edits = () if differ else (Edit("remove", ("bfloat16",)),)
        severity: Severity = "error" if differ else "warning"
        yield Hit(("bfloat16",), config.get("bfloat16"), what, "keep only `bf16`", edits, severity)
