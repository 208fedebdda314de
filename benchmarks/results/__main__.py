"""Write the results into README and docs, or say with ``--check`` where they differ from the files."""

from __future__ import annotations

import argparse
import sys

from benchmarks.results import ROOT, filled, pages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 where a page differs")
    check = parser.parse_args().check
    stale = [page for page in pages() if filled(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]
    for page in stale:
        if not check:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'differs from benchmarks/results' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
