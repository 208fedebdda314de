"""The contest: every method on every network and model of a grid, measured in turns and predicted beforehand."""
