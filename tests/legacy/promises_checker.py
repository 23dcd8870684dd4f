# SPDX-License-Identifier: Apache-2.0
"""List the promises of api_accuracy_checker and its overflow parser, in our words."""

TITLE = "api_accuracy_checker"

PROMISES = {
    "C01": "every API of a training step becomes a test of its own, and the device's result is compared with a bench",
    "C02": "torch 1.8.1 to 2.1",
    "C03": "dumps are small, no GPU is needed as a bench, and each API is tested alone, on random or on real data",
    "C04": "installed by PYTHONPATH, with tqdm, prettytable and pyyaml beside it",
    "C05": "`import api_accuracy_checker.dump` in the training script is enough",
    "C06": 'where no DataLoader is used, `DP.dump.set_dump_switch("ON")` begins the dump',
    "C07": "the second iteration is dumped, then the training ends with `Model pretest: exit after iteration 1.`",
    "C08": "forward_info, backward_info and stack_info json files with the process id, in the working folder",
    "C09": "forward_info and stack_info have the same keys",
    "C10": "msCheckerConfig.update_config sets dump_path, real_data, enable_dataloader and target_iter",
    "C11": "dump_path has to exist; without it the working folder is taken",
    "C12": "real_data=True adds forward_real_data and backward_real_data with the values",
    "C13": "enable_dataloader follows target_iter and ends the training after it",
    "C14": "target_iter is 1 unless said otherwise",
    "C15": "`python run_ut.py -forward f.json -backward b.json`, with -save_error_data and --out_path",
    "C16": "accuracy_checking_result.csv for APIs, accuracy_checking_details.csv for their results",
    "C17": "a result passes with a cosine above 0.99 and the double-thousandth (16 bits) or double-ten-thousandth rule (float32)",
    "C18": "-save_error_data keeps inputs and outputs of APIs that fail, in ut_error_data or below error_data_path",
    "C19": "bfloat16 works",
    "C20": "dropout is judged by its share of zeros",
    "C21": "the bench computes in the next higher precision, so dtypes differ",
    "O01": "the overflow parser reads forward_info_{pid}.json of an overflow dump",
    "O02": "`python run_overflow_check.py -forward ./forward_info_0.json`",
    "O03": "it says for each API whether its overflow is normal or abnormal",
    "O04": "forward only (here: backward too)",
    "O05": "torch 1.8.1 to 2.1, installed as the checker is",
    "O06": "further options are those of the checker: -d for the device, -j accepted",
}

INSTEAD = {
    "C02": "those versions are not tried; the tests run on torch 2.11 and later",
    "C04": "`pip install ulpscope-legacy`; it needs none of the three, and run_ut.py still lies at its old path inside the package",
    "O05": "as C02 and C04",
}
