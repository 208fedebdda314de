"""Names of compressors and the text form of their configurations.

``make("topk(density=0.01) | fp16")`` reads a spec, ``str(compressor)`` writes it. Stages are joined with ``|``: a wrapper
stands before what it wraps, and a value format may follow a sparsifier.
"""

from __future__ import annotations

import ast
import difflib
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from thinwire.core.compressor import Compressor, Maturity, Wrapper
from thinwire.core.errors import ConfigError
from thinwire.core.schedule import SHAPES, Schedule, read_schedule

_registry: dict[str, type[Compressor]] = {}
C = TypeVar("C", bound=type[Compressor])


@dataclass(frozen=True)
class Listing:
    """One registered name, as shown in tables."""

    name: str
    summary: str
    maturity: Maturity
    wrapper: bool
    arguments: tuple[str, ...]


def register(name: str) -> Callable[[C], C]:
    """Class decorator: make a compressor known by ``name``."""

    def add(cls: C) -> C:
        if name in _registry and _registry[name].__qualname__ != cls.__qualname__:
            raise ConfigError(f"the name {name!r} is taken by {_registry[name].__qualname__}; choose another")
        assert is_dataclass(cls), f"{cls.__qualname__} must be a frozen dataclass"
        cls.name = name
        _registry[name] = cls
        return cls

    return add


def available() -> list[Listing]:
    """All registered compressors and wrappers, sorted by name."""
    return [_listing(name, cls) for name, cls in sorted(_registry.items())]


def compressor_class(name: str) -> type[Compressor]:
    """The class registered under ``name``.

    Raises:
        ConfigError: there is none; the message lists the names and suggests the nearest.
    """
    if name in _registry:
        return _registry[name]
    near = difflib.get_close_matches(name, _registry, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown compressor {name!r}.{hint} Available: {', '.join(sorted(_registry))}.")


def make(spec: str | Compressor) -> Compressor:
    """Read a spec such as ``"topk(density=0.01) | fp16"``; a compressor is returned as it is.

    Raises:
        ConfigError: wrong syntax, an unknown name, or an argument that does not exist or does not fit.
    """
    if isinstance(spec, Compressor):
        return spec
    # What is longer can be nested deeper than Python's stack, here or wherever a wrapper asks what it wraps.
    if not isinstance(spec, str) or len(spec) > _MOST_CHARACTERS or spec.count("|") >= _MOST_STAGES:
        limits = f"at most {_MOST_STAGES} stages and {_MOST_CHARACTERS} characters"
        raise ConfigError(f"the compressor is {reprlib.repr(spec)}; expected text of {limits}, {_EXAMPLE}.")
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"cannot read the compressor {spec!r}: {error}. Write {_EXAMPLE}.") from None
    try:
        return _join([_stage(node, spec) for node in _stages(tree)], spec)
    except RecursionError:
        raise ConfigError(f"the compressor {reprlib.repr(spec)} is nested too deeply. Write {_EXAMPLE}.") from None


_EXAMPLE = 'something like "topk(density=0.01) | fp16"'
_MOST_CHARACTERS, _MOST_STAGES = 1000, 32


def _stages(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _stages(node.left) + _stages(node.right)
    return [node]


def _stage(node: ast.expr, spec: str) -> tuple[type[Compressor], dict[str, Any]]:
    """The class and arguments of one stage; only literals are read, nothing is evaluated."""
    if isinstance(node, ast.Name):
        return compressor_class(node.id), {}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        cls = compressor_class(node.func.id)
        if node.args:
            raise ConfigError(f"arguments in {spec!r} need names, for example {_signature(cls)}.")
        arguments: dict[str, Any] = {}
        for word in node.keywords:
            name = _known(cls, word.arg)
            if name in arguments:
                raise ConfigError(f"{name!r} is given twice in {spec!r}; give it once.")
            arguments[name] = _fitting(cls, name, _literal(word.value, spec))
        return cls, arguments
    raise ConfigError(f"cannot read {ast.unparse(node)!r} in the compressor {spec!r}. Write {_EXAMPLE}.")


def _known(cls: type[Compressor], argument: str | None) -> str:
    names = [f.name for f in fields(cls) if f.name != "inner"]  # type: ignore[arg-type]
    if argument in names:
        return argument
    raise ConfigError(f"{cls.name} has no argument {argument!r}. It takes: {', '.join(names) or 'none'}.")


def _fitting(cls: type[Compressor], name: str, value: Any) -> Any:
    """The value, if it is of the kind of its default: ``rank=2.5`` would fail much later, in the first step."""
    default = next(f.default for f in fields(cls) if f.name == name)  # type: ignore[arg-type]
    kind = type(default)
    if isinstance(value, Schedule):
        return _schedulable(cls, name, value)
    if kind not in (bool, int, float, str) or type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ConfigError(f"{cls.name}: {name} is {value!r}; expected {_KINDS[kind]}, for example {name}={default!r}.")


_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}


def _schedulable(cls: type[Compressor], name: str, value: Schedule) -> Schedule:
    if name in cls.scheduled:
        return value
    known = ", ".join(cls.scheduled) or "none of its arguments can"
    raise ConfigError(f"{cls.name}: {name} cannot follow a schedule, got {value!r}. What can: {known}.")


def _literal(node: ast.expr, spec: str) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SHAPES:
        named = {str(word.arg): _literal(word.value, spec) for word in node.keywords}
        return read_schedule(node.func.id, [_literal(value, spec) for value in node.args], named)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ConfigError(f"{ast.unparse(node)!r} in {spec!r} is not a number, a string or True/False.") from None


def _join(stages: list[tuple[type[Compressor], dict[str, Any]]], spec: str) -> Compressor:
    (cls, arguments), rest = stages[0], stages[1:]
    if issubclass(cls, Wrapper):
        if not rest:
            raise ConfigError(f"{cls.name!r} wraps a compressor: write '{cls.name} | topk(density=0.01)'.")
        return _build(cls, {**arguments, "inner": _join(rest, spec)})
    compressor = _build(cls, arguments)
    if not rest:
        return compressor
    value_format, format_arguments = rest[0]
    takes_format = any(f.name == "values" for f in fields(cls))  # type: ignore[arg-type]
    if len(rest) > 1 or format_arguments or not takes_format:
        raise ConfigError(
            f"cannot chain {spec!r}: after {cls.name!r} only a value format without arguments may follow, "
            "and only where values are chosen apart from positions, as in 'topk(density=0.01) | fp16'."
        )
    return _checked(lambda: replace(compressor, values=value_format.name), cls)  # type: ignore[type-var]


def _build(cls: type[Compressor], arguments: dict[str, Any]) -> Compressor:
    return _checked(lambda: cls(**arguments), cls)


def _checked(build: Callable[[], Compressor], cls: type[Compressor]) -> Compressor:
    try:
        return build()
    except TypeError as error:
        raise ConfigError(f"{cls.name}: {error}. It is used as {_signature(cls)}.") from None


def _signature(cls: type[Compressor]) -> str:
    return str(cls.examples()[0])


def _listing(name: str, cls: type[Compressor]) -> Listing:
    summary = next(iter((cls.__doc__ or "").strip().splitlines()), "")
    arguments = tuple(f.name for f in fields(cls) if f.name != "inner")  # type: ignore[arg-type]
    return Listing(name, summary, cls.maturity, issubclass(cls, Wrapper), arguments)
