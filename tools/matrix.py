# SPDX-License-Identifier: Apache-2.0
"""Run the tests on several versions of torch, each in an environment of its own under build/matrix, and print one table.

    python tools/matrix.py                 the versions that the project says were tried
    python tools/matrix.py 2.12.0 2.15.0   these

An environment is made once: torch first, as pip resolves it, then the package with its test dependencies as `constraints.txt` has them.
torch from the index is a CUDA build, so an environment takes 5 to 8 GB; remove build/matrix when you are done.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "matrix"
MINE = re.compile(r"torch|sympy|networkx|filelock|fsspec|jinja2|mpmath|typing_extensions", re.IGNORECASE)
"""What a torch wants in its own versions: left to pip."""


class NotMade(Exception):
    """An environment that could not be made, in one sentence."""


class Counted(NamedTuple):
    """What a run of the tests came to."""

    torch: str
    python: str
    passed: int
    failed: int
    skipped: int


def matrix(versions: list[str]) -> int:
    """Try each version; the exit code is 1 where a test failed or an environment could not be made."""
    rows, refused = [], []
    for version in versions:
        print(f"torch {version}: in build/matrix/{version}", flush=True)
        try:
            rows.append(tried(version))
        except NotMade as error:
            refused.append(str(error))
            print(error, file=sys.stderr)
    print(table(rows))
    print(*refused, sep="\n", end="\n" if refused else "")
    return int(bool(refused) or any(row.failed for row in rows))


def tried(version: str) -> Counted:
    """Make the environment of one version, unless it is there, and run the tests in it."""
    home = HOME / version
    python = home / "bin" / "python"
    if not (home / ".ready").exists():
        make_environment(version, home)
    report = home / "tests.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-n", os.environ.get("JOBS", "2"), "-m", "not long", f"--junitxml={report}"]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    surroundings.pop("PYTHONPATH", None)
    subprocess.run(command, cwd=ROOT, env=surroundings, check=False)
    if not report.exists():
        raise NotMade(f"torch {version}: pytest ended before it could report")
    said = "import sys, torch; print(torch.__version__, sys.version.split()[0])"
    names = subprocess.run([python, "-c", said], capture_output=True, text=True, check=True).stdout.split()
    return counted(report, *names)


def counted(report: Path, torch: str, python: str) -> Counted:
    """Add up what pytest wrote about a run; an error is a failure."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    tests, failures, errors, skipped = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
    return Counted(torch, python, tests - failures - errors - skipped, failures + errors, skipped)


def make_environment(version: str, home: Path) -> None:
    """Put torch, the package and what its tests need into an environment."""
    home.mkdir(parents=True, exist_ok=True)
    constraints = home / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints.write_text("".join(f"{line}\n" for line in lines if not MINE.match(line)), encoding="utf-8")
    pip = [home / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check"]
    limited = [*pip, "-c", constraints]
    log = home / "install.log"
    log.unlink(missing_ok=True)
    for what, command in (
        ("could not be made", [sys.executable, "-m", "venv", home]),
        (f"does not get torch {version}", [*pip, f"torch=={version}"]),
        ("does not get what builds the package", [*limited, "cython", "setuptools", "wheel"]),
        ("does not get the package", [*limited, "--no-build-isolation", "-e", f"{ROOT}[dev]"]),
        ("does not get the older names", [*limited, "--no-build-isolation", "--no-deps", "-e", ROOT / "packages/legacy"]),
    ):
        with log.open("a", encoding="utf-8") as stream:
            done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise NotMade(f"torch {version}: the environment build/matrix/{version} {what}; all that was said is in its install.log")
    (home / ".ready").touch()


def table(rows: list[Counted]) -> str:
    """The rows under one heading.

    >>> print(table([Counted("2.8.0", "3.11.7", 7000, 0, 50)]))
    torch         Python   passed  failed  skipped
    2.8.0         3.11.7     7000       0       50
    """
    heading = f"{'torch':13} {'Python':7} {'passed':>7} {'failed':>7} {'skipped':>8}"
    return "\n".join([heading, *(f"{r.torch:13} {r.python:7} {r.passed:7} {r.failed:7} {r.skipped:8}" for r in rows)])


def versions_tried() -> list[str]:
    """Those that the package names, read without importing it."""
    text = (ROOT / "src/ulpscope/_torch_versions.py").read_text(encoding="utf-8")
    line = re.search(r"^TRIED = \((.+)\)$", text, re.MULTILINE)
    assert line
    return re.findall(r'"([\d.]+)"', line[1])


if __name__ == "__main__":
    sys.exit(matrix(sys.argv[1:] or versions_tried()))
