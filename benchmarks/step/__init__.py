"""Step times on the lab, beyond what `thinwire bench step` measures."""
