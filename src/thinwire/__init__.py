"""Train over slow networks."""
