"""Runs all targets for a while and reports their executions; exits with 1 where one has found something."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz import seeds

HERE = Path(__file__).parent
TARGETS = {"bodies": seeds.BODIES, "streams": seeds.STREAMS}


def run(target: str, seconds: int) -> bool:
    """One target, in a process of its own: libFuzzer ends the process it runs in."""
    findings = HERE / "findings"
    findings.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(TARGETS[target]):
            (Path(corpus) / f"seed-{number}").write_bytes(seed)
        limits = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=30", "-rss_limit_mb=2048"]
        files = [f"-dict={HERE / 'tokens.dict'}", f"-artifact_prefix={findings}/"]
        command = [sys.executable, "-m", f"fuzz.{target}", *limits, *files, "-print_final_stats=1", corpus]
        done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, errors="replace", check=False)
        executions = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
        coverage = re.findall(r"cov: (\d+)", done.stderr)
    print(f"{target}: {executions[1] if executions else 0} executions, {coverage[-1] if coverage else 0} branches")
    if done.returncode != 0 or not executions:
        print(done.stdout[-6000:], done.stderr[-3000:], sep="\n")
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together")
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], default=[], help="all by default")
    options = parser.parse_args()
    targets = options.targets or list(TARGETS)
    results = [run(target, max(1, options.seconds // len(targets))) for target in targets]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
