# SPDX-License-Identifier: Apache-2.0
# The first sample of the torch_npu.hooks guide, its two misprints corrected (the class name, the file name of the second dump).
import torch
import torch.nn as nn
from torch_npu.hooks import register_acc_cmp_hook, seed_all, set_dump_path
from torch_npu.hooks.tools import compare


class ModuleOP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_features=2, out_features=2)
        self.linear_2 = nn.Linear(in_features=2, out_features=1)
        self.relu = nn.ReLU()

    def forward(self, x):
        x1 = self.linear_1(x)
        x2 = self.linear_2(x1)
        r1 = self.relu(x2)
        return r1


module = ModuleOP()
register_acc_cmp_hook(module)
seed_all()
x = torch.randn(2, 2)

set_dump_path("./cpu_module_op.pkl")
out = module(x)
loss = out.sum()
loss.backward()
set_dump_path("./npu_module_op.pkl")

module.npu()
x = x.npu()
out = module(x)
loss = out.sum()
loss.backward()

compare("./npu_module_op.pkl", "./cpu_module_op.pkl", "./module_result.csv")
