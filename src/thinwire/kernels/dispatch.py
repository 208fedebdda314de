"""The one table that says which kernels run where; nothing else in the library knows."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Protocol, cast

from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.types import Bits, Coarse, Quantized, Selected

_log = logging.getLogger(__name__)


class KernelSet(Protocol):
    """What a set of kernels offers; `reference` defines what each function does."""

    NAME: str

    def compensate(
        self,
        grad: Tensor,
        residual: Tensor | None,
        decay: float,
        velocity: Tensor | None,
        momentum: float,
        out: Tensor,
    ) -> bool: ...
    def ef_topk(
        self, grad: Tensor, residual: Tensor | None, offsets: tuple[int, ...], ks: tuple[int, ...], out: Tensor
    ) -> Selected: ...
    def ef_threshold_pack(
        self,
        grad: Tensor,
        residual: Tensor | None,
        offsets: tuple[int, ...],
        thresholds: tuple[float, ...],
        out: Tensor,
    ) -> Selected: ...
    def row_topk(
        self,
        grad: Tensor,
        residual: Tensor | None,
        offsets: tuple[int, ...],
        row_lengths: tuple[int, ...],
        ks: tuple[int, ...],
        out: Tensor,
    ) -> Selected: ...
    def bank_topk(
        self,
        grad: Tensor,
        residual: Tensor | None,
        offsets: tuple[int, ...],
        banks: tuple[int, ...],
        k: int,
        out: Tensor,
    ) -> Selected: ...
    def scatter_mean(self, payloads: Sequence[tuple[Tensor, Tensor]], world_size: int, out: Tensor) -> None: ...
    def int8_encode(self, grad: Tensor, residual: Tensor | None, block: int, out: Tensor) -> Quantized: ...
    def int8_decode(
        self, codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool
    ) -> None: ...
    def int4_encode(self, grad: Tensor, residual: Tensor | None, block: int, out: Tensor) -> Quantized: ...
    def int4_decode(
        self, codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool
    ) -> None: ...
    def coarse_encode(
        self, bits: Coarse, grad: Tensor, residual: Tensor | None, block: int, out: Tensor
    ) -> Quantized: ...
    def coarse_decode(
        self, bits: Coarse, codes: Tensor, scales: Tensor, block: int, weight: float, out: Tensor, accumulate: bool
    ) -> None: ...
    def encode_rows(
        self, bits: Bits, grad: Tensor, residual: Tensor | None, block: int, messages: Tensor, out: Tensor
    ) -> bool: ...
    def decode_rows(self, bits: Bits, messages: Tensor, block: int, out: Tensor) -> None: ...
    def sum_rows(self, bits: Bits, messages: Tensor, block: int, weight: float, out: Tensor) -> None: ...
    def segment_amax(self, x: Tensor, offsets: tuple[int, ...]) -> Tensor: ...
    def segment_moments(self, x: Tensor, offsets: tuple[int, ...]) -> tuple[Tensor, Tensor]: ...
    def all_finite(self, x: Tensor) -> bool: ...
    def pack_bits(self, mask: Tensor) -> Tensor: ...
    def unpack_bits(self, buffer: Tensor, numel: int) -> Tensor: ...
    def crc32(self, data: Tensor) -> int: ...
    def crc32_rows(self, rows: Tensor) -> list[int]: ...
    def count_ages(self, mean: Tensor, since: Tensor, ages: Tensor, cap: int) -> None: ...
    def aged_adamw(
        self,
        weight: Tensor,
        grad: Tensor,
        ages: Tensor,
        moment: Tensor,
        square: Tensor,
        table: Tensor,
        decay: float,
        step_size: float,
        correction: float,
        epsilon: float,
    ) -> None: ...


def _load_native() -> KernelSet:
    native = import_module("thinwire.kernels.native")
    native.load()
    return cast(KernelSet, native)


def _load_triton() -> KernelSet:
    return cast(KernelSet, import_module("thinwire.kernels.triton"))


# Device type -> the fast kernels to try. Whatever fails to load, and every other device, runs the reference.
_LOADERS: dict[str, Callable[[], KernelSet]] = {"cpu": _load_native, "cuda": _load_triton}


@cache
def kernels_for(device_type: str) -> KernelSet:
    """The kernels that run on this type of device, loaded at first use."""
    if device_type in _LOADERS:
        try:
            return _LOADERS[device_type]()
        except (ImportError, OSError) as error:
            _log.warning("no fast kernels for %s, running plain torch instead: %s", device_type, error)
    return reference


def backend(device_type: str = "cpu") -> str:
    """Name of the kernels that run on this type of device: `native-avx512`, ..., `triton` or `reference`."""
    return kernels_for(device_type).NAME
