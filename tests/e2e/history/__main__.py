"""`python -m tests.e2e.history`: a long run; a table at the end; exit code 1 when something was not legal."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from tests.e2e.history.checker import Rules
from tests.e2e.history.nemesis import ACTS
from tests.e2e.history.run import check_again, run_in_rounds, summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.history", description=__doc__)
    parser.add_argument("--store", choices=["file", "etcd"], default="file")
    parser.add_argument("--seconds", type=float, default=60.0, help="in all, about (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of load and faults (default: by chance)")
    parser.add_argument("--round", type=float, default=100.0, help="seconds of one round (default: %(default)s)")
    parser.add_argument("--ttl", type=float, help="seconds (default: 3 and 100, in turn)")
    parser.add_argument("--max-stale", type=float, help="seconds (default: what shows most)")
    names = sorted({act for acts in ACTS.values() for act in acts})
    parser.add_argument("--only", action="append", default=[], choices=names, help="this fault; may be repeated")
    parser.add_argument("--keep", type=Path, help="folder for histories that are not legal")
    parser.add_argument("--check", type=Path, metavar="FILE", help="only check a history that was kept")
    args = parser.parse_args()
    if args.check is not None:
        report = check_again(args.check)
        print(report.complaint())
        print(summary([report]))
        return 0 if report.ok else 1
    seed = random.randrange(1_000_000) if args.seed is None else args.seed
    # Short-lived claims show what expires, long-lived ones what is kept for too long. A short `max_stale` would hide
    # what an etcd watch has missed; of a claim file that was replaced no event tells, so there it is what helps.
    ttls = [3.0, 100.0] if args.ttl is None else [args.ttl]
    max_stale = args.max_stale or (4.0 if args.store == "file" else 60.0)
    rules = [Rules(store=args.store, ttl=ttl, max_stale=max_stale) for ttl in ttls]
    print(f"store {args.store}, seed {seed}", flush=True)
    reports = run_in_rounds(rules, seconds=args.seconds, round_s=args.round, seed=seed, keep=args.keep, only=args.only)
    print(summary(reports))
    return 0 if all(report.ok for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
