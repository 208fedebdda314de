"""Does training over a sparse wire reach dense training's loss? ``python -m benchmarks.convergence`` finds out."""
