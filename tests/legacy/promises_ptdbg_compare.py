# SPDX-License-Identifier: Apache-2.0
"""List the promises of the comparing half of ptdbg_ascend, in our words."""

TITLE = "ptdbg_ascend"

PROMISES = {
    "P005": "two APIs match when their names, the number of their tensors and the shapes are equal",
    "P020": "the way of working: compare the whole net, dump the range around the first No, fix it, compare the whole net again",
    "P024": "compare writes compare_result_{time}.csv and advisor_{time}.txt into the output folder",
    "P025": "the advisor's file and the screen name the Suspect Nodes and give Expert Advice",
    "P026": "parse(pkl, prefix) shows the stack and the statistics of an API",
    "P030": "dumps of several cards are compared with compare_distributed(npu, bench, output)",
    "P031": "both sides need the same number of cards, and folders of ranks only; otherwise nothing is compared",
    "P032": "with several machines the comparison is run on each of them",
    "P102b": "names for list and range are those in the columns NPU Name and Bench Name of an earlier table",
    "P131": "the template compare_data.py runs once the paths of both sides are filled in",
    "P160": "comparing is a script of its own, for one card and for several",
    "P161": "reference speed 0.1 GB/s below 10 GB, 0.3 GB/s above: size of both dumps over the time",
    "P162": "an API that only the NPU has is not compared",
    "P163": "other numbers of calls may lose an API; the rest goes on",
    "P164": "compare_distributed finds and pairs the ranks and takes all options of compare",
    "P165": "its output folder has to exist; files are compare_result_rank{npu}-rank{bench}_{time}.csv",
    "P166": "compare(input_param, output_path, stack_mode=False, auto_analyze=True, fuzzy_match=False)",
    "P167": "input_param names both pkl files and both folders of tensors, and whether every tensor is told on the screen",
    "P168": "stack_mode goes with dumps that hold stacks (here: it shows them; dumps are recognised either way)",
    "P169": "auto_analyze names the first row that says No and its likely cause, on the screen and in advisor_{time}.txt",
    "P170": "fuzzy_match pairs APIs whose names differ in the number of the call only",
    "P171": "parse prints stack and statistics of every name that begins with the prefix",
    "P172": "metrics are Cosine, MaxAbsErr and MaxRelativeErr",
    "P173": "Accuracy Reached or Not: No by cosine and error together, by cosine alone below 0.9, by error alone above 1; else Yes",
}

INSTEAD = {
    "P032": "advice to the reader: compare_distributed looks at the folders of one machine; a dump of several in one folder works as well",
    "P161": "a figure for a machine of 192 cores; `bench/legacy_compare.py` prints ours by the same formula",
}
