"""CPU time of a router's choice among many gangs.

    python -m benchmarks.gang_choice [--gangs 500] [--choices 3000] [--no-gc]

Each gang has up to four open jobs. The same board is asked again and again and hears of no job's end. The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from random import Random
from statistics import median

from engines.gang.load import GangLoad, LoadBoard, NewWork, OpenWork

STEP_S = {"512x512": 0.02, "1024x1024": 0.07, "2048x2048": 0.4}


def board_of(num_gangs: int, random: Random) -> LoadBoard:
    board, stats = LoadBoard(), {}
    for number in range(num_gangs):
        works_s = [random.uniform(0.1, 10.0) for _ in range(random.randrange(5))]
        jobs = {f"{number}-{place}": OpenWork(work_s, work_s) for place, work_s in enumerate(works_s)}
        stats[f"gang{number}"] = GangLoad(jobs=jobs, step_s=STEP_S).to_stats()
    board.hear(stats, 0.0)
    return board


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gangs", type=int, default=500)
    parser.add_argument("--choices", type=int, default=3000)
    parser.add_argument("--no-gc", action="store_true", help="without the garbage collector")
    arguments = parser.parse_args()
    board, names, kinds = board_of(arguments.gangs, Random(1)), [f"gang{i}" for i in range(arguments.gangs)], [*STEP_S]
    if arguments.no_gc:
        gc.disable()
    took_ms = []
    for number in range(arguments.choices):
        begin_s = time.thread_time()
        board.choose(names, str(number), NewWork(kinds[number % len(kinds)], 28), 0.01 * number)
        took_ms.append(1e3 * (time.thread_time() - begin_s))
    took_ms.sort()
    print(json.dumps({**vars(arguments), "median_ms": median(took_ms), "p99_ms": took_ms[int(0.99 * len(took_ms))]}))


if __name__ == "__main__":
    main()
