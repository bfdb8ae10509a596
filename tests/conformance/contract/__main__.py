"""Writes docs/contract.md: `make contract-table`."""

from __future__ import annotations

import sys

from conformance.contract.core import run
from conformance.contract.rows import ROWS
from conformance.contract.table import PAGE, RELEASE, on_release, page


def main() -> int:
    if not on_release():
        print(f"the page describes transformers {RELEASE}", file=sys.stderr)
        return 2
    verdicts = {}
    for row in ROWS:
        verdicts[row.name] = run(row)
        print(row.section, row.name, *(f"{side}={found.word}" for side, found in verdicts[row.name].items()), sep="\t")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(verdicts, ROWS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
