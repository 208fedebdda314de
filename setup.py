"""Builds the optional C kernels; everything else is in pyproject.toml.

The library has no torch ABI and no Python API: it is a plain shared object that `thinwire.kernels.native` opens with
ctypes. `optional=True` lets the package install without a compiler; thinwire then runs on its torch kernels.
"""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/thinwire/kernels/native")

setup(
    ext_modules=[
        Extension(
            "thinwire.kernels.native._library",
            sources=sorted(str(source) for source in NATIVE.glob("*.c")),
            depends=sorted(str(header) for header in NATIVE.glob("*.h")),
            # Contraction would turn a*b+c into an fma and break bit-equality with the torch reference.
            extra_compile_args=[
                "-O3",
                "-std=c11",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fvisibility=hidden",
                "-Wall",
            ],
            optional=True,
        )
    ]
    if any(NATIVE.glob("*.c"))
    else [],
)
