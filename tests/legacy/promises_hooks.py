# SPDX-License-Identifier: Apache-2.0
"""List the promises of torch_npu.hooks, in our words."""

TITLE = "torch_npu.hooks"

PROMISES = {
    "H01": "`torch_npu.hooks` has set_dump_path, seed_all and register_acc_cmp_hook",
    "H02": "`torch_npu.hooks.tools` has compare",
    "H03": "a model moved to the accelerator is compared with itself on the CPU, operator by operator",
    "H04": "two versions of a model on the same device are compared too",
    "H05": "register_acc_cmp_hook(model) sees forward and backward of the whole model",
    "H06": "it may be called for more than one model of a process, also for a copy",
    "H07": "forward: inputs and outputs of every layer are in the file",
    "H08": "backward: gradients of every layer, coming in and going out, are in the file",
    "H09": "seed_all() needs no argument",
    "H10": "set_dump_path names a file, not a folder",
    "H11": "calling it again sends later records to another file",
    "H12": "a hooked model that is moved to another device goes on dumping",
    "H13": "compare takes the file of the NPU, the file of the bench and the csv to write",
    "H14": "the csv has the columns Name, dtypes, shapes, Cosine, RMSE and MAPE",
    "H15": "operators match by name",
    "H16": "and by the number and shapes of their tensors",
    "H17": "an operator without a counterpart is skipped, and matching goes on at the next common one",
    "H18": "the bench is the truth: errors are relative to it",
    "H19": "Cosine is the dot product over both norms, nan where one side is all zero",
    "H20": "RMSE is the root of the mean squared difference",
    "H21": "MAPE is the mean of the relative differences, and has no value where the bench holds a zero",
    "H22": "the guide's sample of two linear layers and a ReLU runs",
    "H23": "the guide's sample of a residual net of torchvision runs",
    "H24": "either side may be moved to a device by its name",
    "H25": "the PyTorch adapter of Ascend has to be installed",
    "H26": "what users are warned of: control what differs, errors add up, kernels differ between devices",
}

INSTEAD = {
    "H25": "not needed any more: without torch_npu, `ulpscope.compat.npu_hooks.install()` makes the old import path by itself",
    "H26": "words only: docs/migrating.md repeats the warning, and the finding beside each compare tells inherited from contributed error",
}
