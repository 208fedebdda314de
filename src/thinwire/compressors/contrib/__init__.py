"""Sparsifiers that estimate a threshold: slower than ``topk`` here and no better (docs/explanation/sparsifiers.md)."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
