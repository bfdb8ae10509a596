"""Puts model types through their calls and writes docs/models.md: `make conformance`."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time

import torch

from conformance.zoo import checks, models, results
from conformance.zoo.page import PAGE, page


def _quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.CRITICAL)


def _run(name: str) -> tuple[results.Record, float]:
    start = time.perf_counter()
    return results.record(checks.check(name)), time.perf_counter() - start


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
        records = []
        with multiprocessing.get_context("spawn").Pool(arguments.jobs, _quiet) as pool:
            for line, seconds in pool.imap(_run, wanted):
                records.append(line)
                print(line["name"], line["route"], line["verdict"], f"{seconds:.1f} s", line["reason"], sep="\t")
        bad = [line["name"] for line in records if line["verdict"] in ("wrong", "error")]
        results.update(results.release(), records, names=every)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    if bad:
        print(f"not as plain decoding: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
