# SPDX-License-Identifier: Apache-2.0
"""List the promises of the shell ptdbg_ascend.parse, in our words."""

TITLE = "ptdbg_ascend.parse"

PROMISES = {
    "R01": "`python -m ptdbg_ascend.parse` shows the prompt `Parse >>> `, and Ctrl+C leaves",
    "R02": "other programs can be typed at the prompt",
    "R03": "`vc -m -g` compares two dumps of Ascend's runtime; `-asc` names a msaccucmp to do it",
    "R04": "its result is result_{time}.csv in an existing `-out` or in parse_data/compare_result, and the screen says where",
    "R04a": "the screen tells where the result was written, how many seconds it took, and that the compare has finished",
    "R05": "msaccucmp is looked for at its usual place in CANN (here: where `-asc` is given without a path; without `-asc` none is needed)",
    "R06": "`dc -n` converts a dump file, or all of a folder, to .npy, to a format given with `-f`, and lists them in a panel",
    "R07": "`pt -n` prints shape, dtype, max, min, mean and path of a .npy file and saves it as text",
    "R08": "`pk -f -n` prints the statistics of an API from a dump file, and its stack where there is one",
    "R09": "`cn -m -g` compares two .npy files by statistics and by elements, with options -p, -s, -al and -rl",
    "R10": "it prints an Error Item Table and a Top Item Table with Index, Left, Right and Diff",
    "R11": "and a panel with files, text files, NpySpec, NumCnt, AllClose, CosSim and ErrorPer",
    "R12": "an element is wrong beyond the absolute and relative limits together, as allclose has it",
    "R13": "-p is the number of rows, 20 unless told; both files are saved as text",
}

INSTEAD: dict[str, str] = {}
