# SPDX-License-Identifier: Apache-2.0
"""List the promises of msprobe about its command line and comparing, in our words."""

TITLE = "msprobe"

PROMISES = {
    "M05": "one command, `msprobe -f pytorch|mindspore COMMAND [-h]`",
    "M06": "its commands run_ut, multi_run_ut, api_precision_compare, compare, run_overflow_check and parse",
    "M08": "the pre-check is there for PyTorch, and not for MindSpore",
    "M09": "compare is there for PyTorch and for MindSpore",
    "M10": "overflows are parsed for PyTorch",
    "M11": "two ACL dumps of an NPU are looked at for consistency",
    "E40": "`compare -i compare.json -o DIR` with -s (stacks), -c (no advice) and -f (fuzzy)",
    "E41": "compare.json has npu_path, bench_path, stack_path and is_print_compare_log",
    "E42": "the result is compare_result_{time}.xlsx, with advisor_{time}.txt beside it",
    "E43": "red rows: NaN or infinities, differences above 1e10, relative errors above 0.5, thousandths from above 0.9 to below 0.6",
    "E44": "yellow rows: tenfold growth above 1, relative errors from below 0.01 to above 0.1, thousandths or cosine down by more than 0.1",
    "E45": "by statistics, Result is Warning above 0.5",
    "E46": "by checksums, Result is Pass, Different or Nan",
    "E47": "the columns of a comparison by tensors",
    "E48": "the columns of a comparison by statistics",
    "E49": "the columns of a comparison by checksums",
    "E50": "run_ut -api_info with -save_error_data, -o, -j, -d, -csv_path, -f and -config",
    "E51": "accuracy_checking_result and accuracy_checking_details csv files with their columns",
    "E52": "multi_run_ut with -n 1 to 64, at most 8 for each device, and several -d",
    "E53": "api_precision_compare judges ratios of errors: up to 1 pass, up to 2 (largest relative error 10) warning, else error",
    "E54": "inf/nan, relative, absolute and binary rates have to be 0; ULP and thousandths have their own limits",
    "E55": "values are small up to 1e-6 in float32 and 1e-3 in 16 bits, and then wrong by 1e-9 and 1e-5",
    "E56": "white_list and black_list together: what both name is not checked",
    "E57": "run_overflow_check -api_info with -j and -d, forward only (here: backward too)",
    "E58": "compare and compare_distributed from a script",
    "E59": "parse has cad, vc on what cad converted, `run`, and no pk",
    "E60": "dumps of MindSpore compare by the same command, with its prefixes Tensor, Functional, Mint, MintFunctional, Primitive, Cell",
    "E61": "26.x: `compare -tp -gp -o`, csv or --xlsx, its columns; ranks by number",
    "E62": "26.x: Result is pass, warning or error by what a call does to the errors of its inputs (limit 0.6 as documented, not 0.1)",
    "E63": "26.x: data_mapping, cell_mapping and fuzzy matching; backward calls of a side that recomputes",
    "E64": "26.x: -da writes diff_analyze_*.json",
    "E65": "26.x: acc_check, multi_acc_check, api_precision_compare by levels of guard",
    "E66": "26.x: overflow_check writes anomaly_analyze_*.json",
    "E67": "26.x: merge_result",
    "E68": "26.x: config_check, graph_visualize, data2db, offline_dump, install_deps",
    "E69": "26.x: `parse -d` converts",
    "E70": "dumps written here are read by the real compare, and its dumps by ours, with the same result",
}

INSTEAD = {
    "E68": "graph_visualize writes our page; the other four end in one sentence that names what to use",
    "E55": "those limits are tested where they are used (tests/measure and tests/judge); api_precision_compare reads what came of them",
}
