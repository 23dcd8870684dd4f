# SPDX-License-Identifier: Apache-2.0
"""Write the comparison as JUnit XML, which every CI server can show: one test case a module, failed where a fault points at it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from ulpscope.model import Comparison, Finding
from ulpscope.report.comparison.counts import call_state
from ulpscope.report.comparison.coverage import gaps_text
from ulpscope.report.escaping import encodable, visible
from ulpscope.report.replacing import replacing

__all__ = ["write_junit"]

_OUTSIDE = "(outside of modules)"
_COVERAGE = "(everything recorded was compared)"


def write_junit(comparison: Comparison, path: Path) -> None:
    """Write the file; the names of test cases do not change from run to run."""
    suites = ElementTree.Element("testsuites")
    suites.append(_suite(comparison))
    ElementTree.indent(suites)
    with replacing(path) as temporary:
        ElementTree.ElementTree(suites).write(temporary, encoding="utf-8", xml_declaration=True)


def _suite(comparison: Comparison) -> ElementTree.Element:
    calls: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for module, phase, state, many in _counted(comparison):
        calls[_case_name(module, phase)][state] += many
    told: defaultdict[str, list[Finding]] = defaultdict(list)
    for finding in comparison.findings:
        if finding.level == "fault" or (finding.kind == "bitwise" and comparison.verdict == "unknown"):
            told[_case_name(finding.module, finding.phase)].append(finding)
    cases = [_coverage_case(comparison), *(_case(name, calls[name], told[name]) for name in dict.fromkeys([*calls, *told]))]
    counts = {kind: sum(case.find(kind) is not None for case in cases) for kind in ("failure", "error", "skipped")}
    suite = ElementTree.Element(
        "testsuite",
        name=_text(f"ulpscope: {comparison.subject_path} against {comparison.reference_path}"),
        tests=str(len(cases)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
    )
    suite.extend(cases)
    return suite


def _coverage_case(comparison: Comparison) -> ElementTree.Element:
    """Report whether everything was compared: an error where a gap leaves the verdict open, skipped where it does not."""
    case = ElementTree.Element("testcase", classname="ulpscope", name=_COVERAGE)
    coverage = comparison.coverage
    if not coverage.is_whole:
        kind = "error" if comparison.verdict == "unknown" and coverage.leaves_doubt else "skipped"
        ElementTree.SubElement(case, kind, message=_text(gaps_text(coverage)))
    return case


def _case_name(module: str, phase: str | None) -> str:
    if module:
        return module
    return {"start": "(parameters and batch)", "optimizer": "(optimizer)", "end": "(end of the step)"}.get(phase or "", _OUTSIDE)


def _counted(comparison: Comparison) -> Iterator[tuple[str, str, str, int]]:
    """Yield module, phase, state and number of calls, condensed steps included."""
    for call in comparison.calls:
        yield call.pair.record.module, call.pair.record.phase, call_state(call), 1
    for (module, phase, state), many in (comparison.condensed.modules if comparison.condensed else {}).items():
        yield module, phase, state, many


def _case(name: str, calls: Counter[str], findings: Sequence[Finding]) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname="ulpscope", name=_text(name))
    for finding in findings:
        kind = "failure" if finding.level == "fault" else "error"
        told = ElementTree.SubElement(case, kind, message=_text(finding.headline), type=_text(finding.kind))
        told.text = "\n".join(map(_text, _lines(finding)))
    if not findings and calls and set(calls) <= {"unmatched", "unmeasured"}:
        ElementTree.SubElement(case, "skipped", message="no call of it could be compared")
    inherited = calls["inherited"] + calls["amplified"]
    if inherited:
        note = f"{inherited} of {calls.total()} calls inherit a difference; what made it is another test case's failure"
        ElementTree.SubElement(case, "system-out").text = note
    return case


def _lines(finding: Finding) -> list[str]:
    source = [f"{finding.source.file}:{finding.source.line} in {finding.source.function}"] if finding.source else []
    rest = [f"repro: {finding.repro}"] if finding.repro else []
    return [finding.headline, *finding.evidence, *source, *rest, *([f"next: {finding.next}"] if finding.next else [])]


def _text(text: str) -> str:
    """Spell out control characters: XML has no way to hold them."""
    return visible(encodable(text))
