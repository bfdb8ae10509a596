"""Puts model types through their calls and writes docs/models.md: `make conformance`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys

from conformance.zoo import models, results, worker
from conformance.zoo.page import PAGE, page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; default all of the installed transformers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--present", action="store_true", help="leave out types that this transformers does not have")
    parser.add_argument("--page-only", action="store_true", help="write the page from the results that are there")
    arguments = parser.parse_args()
    every = models.types()
    wanted = [name for part in arguments.types for name in part.split(",") if name] or every
    unknown = sorted(set(wanted) - set(every))
    if arguments.present:
        wanted = [name for name in wanted if name in every]
    elif unknown:
        parser.error(f"no such types: {', '.join(unknown)}")
    bad = []
    if not arguments.page_only:
        with multiprocessing.get_context("spawn").Pool(arguments.jobs, worker.quiet) as pool:
            for line, seconds in pool.imap(worker.run, wanted):
                told = line["name"], line["route"], line["verdict"], f"{seconds:.1f} s", line["reason"]
                print(*told, sep="\t", flush=True)
                # At once: a run that is stopped keeps what it has found.
                results.update(results.release(), [line], names=every)
                if line["verdict"] in ("wrong", "error"):
                    bad.append(line["name"])
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    if bad:
        print(f"not as plain decoding: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
