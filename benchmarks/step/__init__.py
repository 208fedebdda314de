"""Step times on the lab: of compressors (`python -m benchmarks.step`), and of an exchange alone."""
