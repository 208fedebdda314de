"""What contestants that share a process need in order not to pay for each other."""

from __future__ import annotations

# glibc gives memory that was freed at the end of its heap back to the system, and asks for it again in the next step. Whose
# gradients happen to lie there pays for it: of contestants with the same model one had 15,000 page faults in a step and
# another 200. With these variables in the environment of a worker freed memory is kept, for all alike.
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
