"""A dictionary that records what DeepSpeed looks up in it, and JSON forms of the defaults that it finds."""

import enum

MISSING = object()
"""The default of a key that is looked up without one."""


class Recorder(dict):
    """A dictionary that records which keys are looked up in it, and with which defaults."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen: dict[str, object] = {}

    def get(self, key, default=None):  # noqa: D102
        self._saw(key, default)
        return super().get(key, default)

    def pop(self, key, *default):  # noqa: D102
        self._saw(key, *default)
        return super().pop(key, *default)

    def __getitem__(self, key):
        self._saw(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self._saw(key)
        return super().__contains__(key)

    def keys(self):  # noqa: D102
        return RecordedKeys(self)

    def __bool__(self):
        return True  # DeepSpeed skips an empty section before it looks anything up

    def __copy__(self):
        return self

    def _saw(self, key, default=MISSING):
        if default is not MISSING or key not in self.seen:
            self.seen[key] = default


class RecordedKeys:
    """`key in section.keys()` counts as looking the key up."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def __contains__(self, key):
        return key in self.recorder

    def __iter__(self):
        return dict.__iter__(self.recorder)

    def __len__(self):
        return len(self.recorder)


def plain(value: object) -> object:
    """Return `value` as JSON data; None if JSON cannot express it."""
    if value is MISSING:
        return None
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (bool, int, float, str, type(None))):
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None
