"""What sparsifiers do to the gradients of real models: ``python -m benchmarks.sparsifiers.gradients`` measures it."""
