"""The frozen surface: what others build on. A change here is a decision, not an accident."""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import thinwire
from thinwire.core.registry import compressor_class

NAMES = [
    "Attached",
    "CheckpointError",
    "Compressor",
    "ConfigError",
    "DesyncError",
    "PayloadError",
    "ThinwireError",
    "TransportError",
    "WireStats",
    "__version__",
    "attach",
    "available",
    "make",
    "optim",
    "register",
]
# Positional names first, then keyword-only ones with their defaults.
ATTACH_POSITIONAL = ["module", "optimizer"]
ATTACH_KEYWORDS = {
    "compress": "auto",
    "fuse": "auto",
    "sync": "every_step",
    "plan": None,
    "quality": "safe",
    "scaler": None,
    "broadcast_buffers": True,
    "transport": None,
    "seed": 0,
    "timeout_s": 60.0,
    "events": None,
    "observers": (),
    "process_group": None,
}
ATTACHED = {
    "averaged",
    "detach",
    "explain",
    "idle_step",
    "load_state_dict",
    "metrics",
    "no_sync",
    "received",
    "report_loss",
    "state_dict",
    "stats",
    "trace",
    "__enter__",
    "__exit__",
}
STATS = ["steps", "skipped_steps", "wire_bytes", "dense_bytes", "wait_s", "encode_s", "wire_s", "decode_s"]
COMPRESSORS = {
    "dense": set(),
    "fp16": set(),
    "bf16": set(),
    "topk": {"density", "score", "values", "indices"},
    "randomk": {"density"},
    "threshold": {"value", "density", "values", "indices"},
    "powersgd": {"rank", "reuse"},
    "sign": set(),
    "int8": set(),
    "int4": set(),
    "qsgd": {"bits"},
    "ef": {"decay"},
    "noef": set(),
    "momentum": {"mu"},
    "route": {"min_elems", "min_dims"},
}
# What authors of compressors, transports, observers and policies build on, by package.
PACKAGES = {
    "core": {
        "ELEMENTWISE", "RESIDUAL", "AllGather", "AllReduce", "AllToAll", "Broadcast", "CheckpointError", "Codec",
        "Compressor", "ConfigError", "DesyncError", "Exchange", "Exchanged", "Layout", "Listing", "Payload",
        "PayloadError", "Reply", "Request", "Role", "Schedule", "State", "Step", "TensorSpec", "ThinwireError",
        "TransportError", "UnitSpec", "Wrapper", "available", "make", "memory", "register", "residual_key",
    },
    "comm": {
        "GLOO_LANES", "Delayed", "Faulty", "Framed", "Job", "Link", "Pending", "Rounds", "Span", "Tag",
        "Throttled", "TorchDistTransport", "Trace", "Transport", "fit_lanes", "simulate", "write_chrome_trace",
    },
    "exchange": {"Channel", "Fixed", "Membership", "Outcome", "Transaction"},
    "observe": {"EventError", "EventWriter", "Observer", "StepReport", "WireStats", "read_events"},
    "sync": {"Policy", "parse_policy", "policies"},
}  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_of_packages(package: str) -> None:
    module = import_module(f"thinwire.{package}")
    assert set(module.__all__) == PACKAGES[package]
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_public_names() -> None:
    assert sorted(thinwire.__all__) == sorted(NAMES)
    for name in NAMES:
        assert getattr(thinwire, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = thinwire.nonsense


def test_attach_signature() -> None:
    parameters = inspect.signature(thinwire.attach).parameters
    positional = [name for name, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = {name: p.default for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert positional == ATTACH_POSITIONAL
    assert parameters["optimizer"].default is None
    assert ATTACH_KEYWORDS.items() <= keywords.items(), "an argument has gone or has another default"
    assert not keywords.keys() - ATTACH_KEYWORDS.keys(), "a new argument: add it here and to the docs"


def test_attached_has_what_the_docs_promise() -> None:
    public = {name for name, _ in inspect.getmembers(thinwire.Attached, callable) if not name.startswith("_")}
    assert public | {"__enter__", "__exit__"} == ATTACHED
    assert hasattr(thinwire.Attached, "__enter__")
    assert hasattr(thinwire.Attached, "__exit__")
    assert isinstance(inspect.getattr_static(thinwire.Attached, "plan"), property)


def test_stats_fields() -> None:
    assert [field.name for field in dataclasses.fields(thinwire.WireStats)] == STATS


@pytest.mark.parametrize("name", COMPRESSORS)
def test_registered_names_keep_their_arguments(name: str) -> None:
    arguments = {field.name for field in dataclasses.fields(compressor_class(name))} - {"inner"}  # type: ignore[arg-type]
    assert arguments >= COMPRESSORS[name]


def test_compressors_are_frozen_and_keyword_only() -> None:
    for listing in thinwire.available():
        cls = compressor_class(listing.name)
        assert cls.__dataclass_params__.frozen, listing.name  # type: ignore[attr-defined]
        assert all(field.kw_only for field in dataclasses.fields(cls)), listing.name  # type: ignore[arg-type]
        assert cls.__doc__, listing.name


def test_errors_are_of_the_promised_families() -> None:
    for error in (thinwire.ConfigError, thinwire.PayloadError, thinwire.CheckpointError):
        assert issubclass(error, ValueError)
        assert issubclass(error, thinwire.ThinwireError)
    for runtime_error in (thinwire.TransportError, thinwire.DesyncError):
        assert issubclass(runtime_error, RuntimeError)
        assert issubclass(runtime_error, thinwire.ThinwireError)


def test_typing_marker_is_there() -> None:
    assert (Path(thinwire.__file__).parent / "py.typed").exists()
