"""Plain JSON values as typed objects: one check for plans, probes, profiles, ledgers, groups and events.

``from_json(Plan, values, ...)`` follows type hints: an object becomes a dataclass, a list a tuple or a NamedTuple. What does
not fit is named by its path (``candidates[2].step_s``), with what was got and what was expected. A class whose JSON is not
its fields has ``to_plain`` and a classmethod ``from_plain``, and the hint of its argument says what its JSON is. A class
attribute ``VERSION`` is written, and asked for, as ``version``; with ``OPEN = True`` fields that it does not have are passed
over.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from thinwire.core.errors import ConfigError

T = TypeVar("T")
NonFinite = Annotated[float, "or NaN, or infinite"]  # every other number must be finite
MAX_DEPTH = 20  # of values that no hint describes
MAX_INT = 1 << 63  # larger whole numbers fit neither tensors nor messages


class _Misfit(Exception):
    """What does not fit, and where."""


def load_json(path: Path, *, what: str, remedy: str) -> Any:
    """The plain values in a file; ConfigError if there are none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}; {remedy}") from error


def save_json(path: Path, values: Any) -> None:
    """Write plain values; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def to_json(value: Any) -> Any:
    """What ``from_json`` reads back."""
    if hasattr(value, "to_plain"):
        return to_json(value.to_plain())
    if is_dataclass(value):
        version = {"version": value.VERSION} if hasattr(value, "VERSION") else {}
        return {**version, **{f.name: to_json(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, Mapping):
        return {str(key): to_json(one) for key, one in value.items()}
    return [to_json(one) for one in value] if isinstance(value, list | tuple) else value


def from_json(
    kind: type[T],
    values: Any,
    *,
    what: str,
    remedy: str,
    error: type[ValueError] = ConfigError,
) -> T:
    """What ``values`` describe.

    Args:
        what: names them, ``remedy`` says what to do.

    Raises:
        error: a field is missing, unknown, or of another type.
    """
    try:
        made: T = _read(kind, values, "")
    except _Misfit as misfit:
        raise error(f"the {what} does not fit: {misfit}; {remedy}") from None
    return made


def _read(hint: Any, value: Any, at: str) -> Any:
    if hint in _SCALARS:
        fits, expected = _SCALARS[hint]
        if not fits(value):
            _refuse(at, value, expected)
        return hint(value) if hint in (int, float) else value
    origin, arguments = get_origin(hint), get_args(hint)
    if NoneType in arguments:
        return None if value is None else _read(next(one for one in arguments if one is not NoneType), value, at)
    if origin is Literal:
        return value if isinstance(value, str) and value in arguments else _refuse(at, value, f"one of {arguments}")
    if origin is None:
        return _object(hint, value, at)
    if issubclass(origin, Mapping):
        items = _mapping(value, at).items()
        return {_key(arguments[0], key, at): _read(arguments[1], one, f"{at}[{key!r}]") for key, one in items}
    fixed = origin is tuple and arguments[-1] is not Ellipsis
    if not isinstance(value, list | tuple) or (fixed and len(value) != len(arguments)):
        _refuse(at, value, f"a list of {len(arguments)}" if fixed else "a list")
    hints = arguments if fixed else arguments[:1] * len(value)
    read = [_read(one, part, f"{at}[{i}]") for i, (one, part) in enumerate(zip(hints, value, strict=True))]
    return tuple(read) if origin is tuple else read


def _object(kind: Any, value: Any, at: str) -> Any:
    if hasattr(kind, "from_plain"):
        hint = next(iter(_hints(kind.from_plain).values()))
        return _made(lambda: kind.from_plain(_read(hint, value, at)), at)
    hints, defaults = _hints(kind), _defaults(kind)
    if issubclass(kind, tuple):
        if not isinstance(value, list | tuple) or len(value) > len(hints):
            _refuse(at, value, f"a list of {', '.join(hints)}")
        value = dict(zip(hints, value, strict=False))
    prefix = f"{at}." if at else ""
    if hasattr(kind, "VERSION"):
        value = dict(_mapping(value, at))
        if (version := value.pop("version", None)) != kind.VERSION:
            _refuse(f"{prefix}version", version, str(kind.VERSION))
    known = {key: one for key, one in _mapping(value, at).items() if key in hints}
    for key, one in value.items():
        if key not in known and not getattr(kind, "OPEN", False):
            _refuse(f"{prefix}{key}", one, f"no such field; there are {', '.join(hints)}")
    for key in hints:
        if key not in known and key not in defaults:
            raise _Misfit(f"{prefix}{key} is missing")
    named = {key: _read(hints[key], one, f"{prefix}{key}") for key, one in known.items()}
    return _made(lambda: kind(**named), at)


def _made(make: Callable[[], Any], at: str) -> Any:
    try:
        return make()
    except ValueError as error:  # of __post_init__: what fits by type may still make no sense
        raise _Misfit(f"{at}: {error}" if at else str(error)) from error


@cache
def _hints(of: Any) -> dict[str, Any]:
    hints = get_type_hints(of, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "return" and get_origin(hint) is not ClassVar}


@cache
def _defaults(kind: Any) -> Collection[str]:
    if issubclass(kind, tuple):
        return kind._field_defaults.keys()  # type: ignore[no-any-return]
    return {f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING}


def _refuse(at: str, value: object, expected: str) -> NoReturn:
    raise _Misfit(f"{at or 'it'} is {reprlib.repr(value)}, expected {expected}")


def _mapping(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        _refuse(at, value, "an object with named fields")
    return value


def _key(hint: Any, key: str, at: str) -> Any:
    whole = hint is int and key.isascii() and key.isdigit() and len(key) < 20
    return _read(hint, int(key) if whole else key, f"a key of {at}")


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < MAX_INT)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_plain(value: Any, levels: int = MAX_DEPTH) -> bool:
    if isinstance(value, Mapping):
        return levels > 0 and all(isinstance(key, str) and _is_plain(value[key], levels - 1) for key in value)
    if isinstance(value, list | tuple):
        return levels > 0 and all(_is_plain(one, levels - 1) for one in value)
    return value is None or isinstance(value, str | bool) or _is_finite(value)


_SCALARS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    str: (lambda value: isinstance(value, str), "a text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: _is_finite(value) and abs(value) < MAX_INT and value == int(value), "a whole number"),
    float: (_is_finite, "a finite number"),
    NonFinite: (_is_number, "a number"),
    Any: (_is_plain, f"finite numbers, texts, lists and objects, nested at most {MAX_DEPTH} deep"),
}
